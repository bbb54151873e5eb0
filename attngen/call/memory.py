"""Orders in which axes lie in memory: of a call's output, and of its gradients."""

from __future__ import annotations

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
