"""Choice: whether kernels or the reference compute a call."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...call.decode import unsplit
from ...call.table import LENGTHS, AttentionCall
from ...errors import AttngenError, SpecError
from ...fragments import features
from ...spec.attention_spec import DTYPES_8BIT, MAX_HEAD_DIM, AttentionSpec, dtype_name
from ...spec.layouts import axes_of, parse
from ...spec.resolve import find_violations
from ...targets.target import names
from .descriptions import device_arch
from .torch_private import is_traced

log = logging.getLogger("attngen")

_FEATURES = features.scan()  # here, not in a call: torch.compile cannot trace file access
BACKENDS = ("auto", "cuda", "reference")
# Whether a call waits for its lengths and page tables, and refuses those that cannot be right.
CHECK_VALUES = os.environ.get("ATTNGEN_CHECK", "") not in ("", "0")


def use_kernels(call: AttentionCall) -> bool:
    """Whether kernels serve this call; checks all of its arguments.

    Raises: SpecError where they do not agree, or the backend that was named cannot serve them.
    """
    backend = call.backend
    if backend not in BACKENDS:
        raise SpecError(f"backend={backend!r}; allowed: {', '.join(BACKENDS)}")
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


class _Described(NamedTuple):
    """An operand of which a trace says nothing but this."""

    dtype: torch.dtype
    shape: tuple[int, ...]


MANY = 1 << 20  # positions: no few queries


def _described(call: AttentionCall) -> tuple[Tensor | _Described | None, ...]:
    """Q, K and V as the choice of a kernel sees them. Of a trace, whose sizes may be symbols,
    dtypes and head dims alone: which of a variant's kernels a call takes is for the operation to
    say when it runs. Heads that are so wide that only kernels for few queries have them, and
    operands that the copy engine alone reads, are looked at as they are."""
    operands = call.q, call.k, call.v
    if not is_traced(operands):
        return operands
    layout = parse(call.layout)
    widest = max(*[x.shape[-1] for x in operands if x is not None], 0)
    unboxed = any(x is not None and dtype_name(x.dtype) in DTYPES_8BIT for x in operands)
    if widest > MAX_HEAD_DIM or unboxed or call.num_splits or layout.paged:
        return operands
    sizes = {"h": 1, "3": 3, "2": 2}
    described: list[_Described | None] = []
    for name, x in zip("qkv", operands, strict=True):
        if x is None:
            described.append(None)
        else:
            shape = [sizes.get(axis, MANY) for axis in axes_of(layout, name)]
            described.append(_Described(x.dtype, (*shape[:-1], x.shape[-1])))
    return tuple(described)


def refusals(call: AttentionCall) -> list[str]:
    """Why no kernel can serve this call; empty where one can."""
    device = call.q.device
    if device_arch(device) is None:
        available = ", ".join(names())
        which = str(device)
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            which += f" (sm_{major}{minor})"
        return [f"{which} has no kernels; available: {available}"]
    learned = [
        f"{name} requires a gradient, of which kernels have none; pass a number, or detach it"
        for name in ("softmax_scale", "softcap")
        if isinstance(number := getattr(call, name), Tensor)
        and number.requires_grad
        and torch.is_grad_enabled()
    ]
    spec = AttentionSpec.from_call(
        *_described(call),
        layout=call.layout,
        mask=call.mask,
        window=call.window,
        attn_mask=call.attn_mask,
        bias=call.bias,
        bias_type=call.bias_type,
        alibi_slopes=call.alibi_slopes,
        softcap=call.softcap,
        score_mod=call.score_mod,
        mask_mod=call.mask_mod,
        block_mask=call.block_mask,
        softmax=call.softmax,
        dropout_p=call.dropout_p,
        out_dtype=call.out_dtype,
        return_max_logit=call.return_max_logit,
        num_splits=call.num_splits,
        **{name: getattr(call, name) for name in LENGTHS},
    )
    reasons = [violation.reason for violation in find_violations(spec, _FEATURES)]
    return learned + reasons + unsplit(call.num_splits or 0, spec.decode)


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
