"""Tables that keep the order of sequences whose lengths vary from one call to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..fragments import features
from ..runtime.run_time import FEW_SEQUENCES, SCHEDULE_BYTES, schedule_entries
from ..spec.problem import Problem
from ..spec.resolve import resolve
from .numbers import Arguments
from .operands import Source, extents_of, sequences_of, spec_of, unpacked
from .table import OPTIONAL
from .tensors import Described, dtype_name, is_contiguous

# Of a forward's queries, and of a backward's keys and queries, each its part of the table.
PARTS = {"fwd": {"q_schedule": 0}, "bwd": {"kv_schedule": 1, "q_schedule": 2}}
WORDS = SCHEDULE_BYTES // 4


class Ordered(NamedTuple):
    """Facts that an order depends on beside the lengths: the forward's problem, whether its
    gradients are to be deterministic, which may take other tiles, heads of queries and of keys,
    sequences."""

    problem: Problem
    deterministic: bool
    heads_q: int
    heads_kv: int
    sequences: int


def ordered_by(operands: Sequence[Described | None], arguments: Arguments) -> Ordered:
    """Find what the order of a call depends on. operands: of `table.INPUTS`.

    Raises: SpecError where it has no kernels.
    """
    q, k, v, *rest = operands
    assert q is not None  # the operation's schema
    optional = dict(zip(OPTIONAL, rest, strict=True))
    q, k, v = unpacked(q, k, v, arguments.layout)
    (problem,) = resolve(spec_of(q, k, v, optional, arguments), features.scan())
    extents = extents_of({"q": q, "k": k}, arguments.layout)
    sequences = sequences_of(q, optional, arguments.layout)
    heads = extents["q"].heads, extents["k"].heads
    return Ordered(problem, arguments.deterministic, *heads, sequences)


def table_shape(sequences: int) -> tuple[int, int, int]:
    """The shape of a schedule's operand."""
    return 3, schedule_entries(sequences), WORDS


def table_for(schedule: Described | None, sequences: int, served: bool = True) -> Described | None:
    """The operand, where the kernels of a call read it: of few sequences they do not, nor where
    threads copy what it was made for the copy engine's tiles of."""
    return schedule if served and sequences > FEW_SEQUENCES else None


def numbers_of(schedule: Described | None) -> dict[str, int | float]:
    """Whether the order is kept."""
    return {"kept": int(schedule is not None)}


def sources_of(schedule: Described | None, direction: str) -> tuple[Source, ...]:
    """Where kernels find their parts of the table; none where it is theirs alone."""
    if schedule is None:
        return ()
    bytes_of_part = schedule.stride()[0] * schedule.element_size()
    parts = PARTS[direction].items()
    return tuple((name, "schedule", part * bytes_of_part) for name, part in parts)


def violations(schedule: Described | None, sequences: int) -> list[str]:
    """Find what is wrong with the operand."""
    if schedule is None:
        return []
    shape = table_shape(sequences)
    if (dtype_name(schedule), tuple(schedule.shape)) == ("int32", shape):
        if is_contiguous(schedule):
            return []
    return [f"schedule needs contiguous int32 {list(shape)}; pass an attngen.Schedule"]
