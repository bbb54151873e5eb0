"""Orders in which axes lie in memory: of a call's output, and of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SpecError
from ..spec import layouts
from .numbers import Arguments
from .table import CARRIERS, AttentionCall
from .tensors import Described

CONTIGUOUS, LIKE_Q = "contiguous", "like_q"


def order_of(tensor: Described) -> str:
    """The axes of a tensor, the outermost in memory first, as digits; the last axis is innermost
    whatever its stride."""
    steps = tensor.stride()
    *front, last = range(tensor.ndim)
    return "".join([str(axis) for axis in (*sorted(front, key=lambda x: -steps[x]), last)])


def memory_of(call: AttentionCall) -> str:
    """The orders of a call whose output lies like Q: of its output and dQ, and, where no operands
    are packed into one, of dK and dV. Empty where all are contiguous.

    Raises: SpecError where `out_layout` is none that there is.
    """
    if call.out_layout not in (CONTIGUOUS, LIKE_Q):
        allowed = f"{CONTIGUOUS}, {LIKE_Q}"
        raise SpecError(f"out_layout={call.out_layout!r}; allowed: {allowed}")
    if call.out_layout == CONTIGUOUS:
        return ""
    layout = layouts.parse(call.layout)
    operands = layouts.unpack(layout, call.q, call.k, call.v)
    packed = any(x is None for x in (call.k, call.v))
    orders = [order_of(x) for x in (operands[:1] if packed else operands)]
    return ",".join(orders) if any([[*x] != sorted(x) for x in orders]) else ""


def order_in(arguments: Arguments, name: str = "q") -> str:
    """The order of what has the axes of an operand of that name: the output or its gradient; empty
    where it is contiguous."""
    orders = dict(zip(CARRIERS, arguments.memory.split(","), strict=False))
    return orders.get(name, "")


def has_one_place_each(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in places of their own, as they do where each axis steps over those
    within it."""
    reach = 0
    for step, size in sorted([(step, n) for n, step in zip(sizes, strides, strict=True) if n > 1]):
        if step <= reach:
            return 0 in sizes
        reach += step * (size - 1)
    return True


def share_bytes(one: Described, at: int, other: Described, other_at: int) -> bool:
    """Whether tensors at two addresses have a byte in common. Rows of one between rows of the
    other have none, as slices of one buffer lie: where steps are multiples of a period, within
    which both lie apart."""
    if 0 in one.shape or 0 in other.shape:
        return False
    axes = [_axes_in_bytes(x) for x in (one, other)]
    first, second = map(_reach, axes)
    if at + first <= other_at or other_at + second <= at:
        return False
    for period in {step for each in axes for _, step in each}:
        if any([step > period and step % period for each in axes for _, step in each]):
            continue
        first, second = (_reach([(n, step) for n, step in each if step < period]) for each in axes)
        ahead = (other_at - at) % period
        if first <= ahead and ahead + second <= period:
            return False
    return True


def _axes_in_bytes(tensor: Described) -> list[tuple[int, int]]:
    """Size and step of each axis that has several places, and of an element's bytes."""
    item = tensor.element_size()
    steps = [(n, step * item) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return [(item, 1), *[(n, step) for n, step in steps if n > 1]]


def _reach(axes: Sequence[tuple[int, int]]) -> int:
    """Bytes from the first to behind the last."""
    return 1 + sum([(n - 1) * step for n, step in axes])
