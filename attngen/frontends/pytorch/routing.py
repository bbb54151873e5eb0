"""Choice: whether kernels or the reference compute a call."""

from __future__ import annotations

import logging
import os

import torch
from torch import Tensor

from ... import reference
from ...call import routing
from ...call.backend import check_backend
from ...call.table import AttentionCall
from ...errors import AttngenError, SpecError
from .descriptions import device_arch
from .torch_private import is_traced

log = logging.getLogger("attngen")

# Whether a call waits for its lengths and page tables, and refuses those that cannot be right.
CHECK_VALUES = os.environ.get("ATTNGEN_CHECK", "") not in ("", "0")


def use_kernels(call: AttentionCall) -> bool:
    """Whether kernels serve this call; checks all of its arguments.

    Raises: SpecError where they do not agree, or the backend that was named cannot serve them.
    """
    backend = call.backend
    check_backend(backend)
    if backend == "reference":
        return False
    operands = reference.check(call)
    if CHECK_VALUES and not is_traced((call.q,)):
        reference.check_on_host(call, operands)
    reasons = refusals(call)
    if reasons and backend == "cuda":
        raise SpecError(reasons)
    if reasons:
        _log_once("; ".join(reasons))
    return not reasons


def refusals(call: AttentionCall) -> list[str]:
    """Why no kernel can serve this call; empty where one can."""
    device = call.q.device
    arch = device_arch(device)
    if arch is None:
        which = str(device)
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            which += f" (sm_{major}{minor})"
        return [routing.no_kernels(which)]
    learned = [
        f"{name} requires a gradient, of which kernels have none; pass a number, or detach it"
        for name in ("softmax_scale", "softcap")
        if isinstance(number := getattr(call, name), Tensor)
        and number.requires_grad
        and torch.is_grad_enabled()
    ]
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (call.q, call.k, call.v, call.bias, call.sink)
    )
    directions = ("fwd", "bwd") if learns else ("fwd",)
    return learned + routing.refusals(call, is_traced((call.q, call.k, call.v)), arch, directions)


def can_join(call: AttentionCall) -> bool:
    """Whether kernels that serve a call, which asks for a float32 output, can also join what they
    compute with an output and an LSE that are there."""
    arch = device_arch(call.q.device)
    return arch is not None and routing.can_join(call, arch)


def leave_kernels(refusal: AttngenError, backend: str) -> None:
    """Log why a call that kernels were to serve goes to the reference.

    Raises: the refusal, where the call named its backend.
    """
    if backend != "auto":
        raise refusal
    _log_once("; ".join(refusal.reasons))


_logged: set[str] = set()


def _log_once(reason: str) -> None:
    if not torch.compiler.is_compiling() and reason not in _logged:
        _logged.add(reason)
        log.warning("attention runs on the reference backend: %s", reason)
