"""Refusals of calls that only torch's tensors show: derivatives, storage, values."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import decode
from ...call.checks import number_violations
from ...call.gradient_checks import BIAS, gradient_violations, no_gradient
from ...call.numbers import Arguments
from ...call.operands import softmax_scale_of
from ...call.table import INPUTS
from ...errors import SpecError
from ...reference.entry_checks import few
from ...reference.sizes import surely
from ...reference.subclasses import unreadable
from ...reference.type_checks import is_flag
from .schedule import Schedule
from .signature import Operands
from .transforms import NO_TANGENTS, may_have_tangents, refuse_tangents

LSE_LIMIT = 2.0**24  # from there on, without a bias, a row has no gradient


def check_rest(num_splits: object, deterministic: object, schedule: object) -> None:
    """Raises: SpecError where these arguments, which the reference does without, are wrong."""
    decode.check_splits(num_splits)
    if not is_flag(deterministic):
        got = f"got {deterministic!r}"
        raise SpecError(f"deterministic needs True, False or None; {got}. Pass one.")
    if not (schedule is None or isinstance(schedule, Schedule)):
        raise SpecError(f"schedule needs an attngen.Schedule; got {schedule!r}. Make one.")


def refuse_unreadable(operands: Operands) -> None:
    """Raises: SpecError where the storage of an operand does not hold its numbers."""
    if torch.compiler.is_compiling():
        return
    found = [None if x is None else unreadable(x) for x in operands]
    reasons = [f"{name} {why}" for name, why in zip(INPUTS, found, strict=True) if why is not None]
    if reasons:
        raise SpecError(reasons)


def refuse_derivatives(operands: Operands, arguments: Arguments, gradients: bool) -> None:
    """Raises: SpecError where a call needs derivatives that kernels do not have. gradients: whether
    it needs those."""
    if gradients and (reasons := _gradient_violations(operands, arguments)):
        raise SpecError(reasons)
    refuse_tangents(operands)


def traced_refusal(operands: Operands, arguments: Arguments, backend: str) -> SpecError | None:
    """Why a call in code that is being compiled leaves the kernels, where any backend may serve
    it: of what a trace knows, which is not where operands begin."""
    if backend != "auto":
        return None
    reasons = [*number_violations(softmax_scale_of(_q_of(operands), arguments), arguments.softcap)]
    given = [(name, x) for name, x in zip(INPUTS, operands, strict=True) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for _, x in given):
        reasons += _gradient_violations(operands, arguments)
        refused = [no_gradient(name) for name, x in given if x.requires_grad]
        reasons += [reason for reason in refused if reason is not None]
    if may_have_tangents(operands):
        reasons.append(NO_TANGENTS)
    return SpecError(reasons) if reasons else None


def _q_of(operands: Operands) -> Tensor:
    q, *_ = operands
    assert q is not None  # the operation's schema
    return q


def _gradient_violations(operands: Operands, arguments: Arguments) -> list[str]:
    """Why kernels have no gradients of a call that needs them."""
    added = operands[BIAS]
    learns = added is not None and added.requires_grad
    return [*gradient_violations(operands, arguments, learns, surely)]


def check_rows(lse: Tensor) -> None:
    """Refuse rows that kernels of a call without a bias give no gradient; waits for the device.
    lse: [b, h, s] or [h, t], of the forward.

    Raises: SpecError naming the first of them.
    """
    size = lse.abs()
    lost = ((size >= LSE_LIMIT) & (size < float("inf"))).nonzero().tolist()
    if lost:
        raise SpecError(
            few(
                f"lse{place}={lse[tuple(place)].item():g}: rows of a call without a bias have no "
                "gradient from 2^24 on. Scale q or k down."
                for place in lost
            )
        )
