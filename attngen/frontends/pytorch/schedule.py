"""Schedule: the order of sequences whose lengths vary, kept from one call to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...call.numbers import Arguments
from ...call.operands import Source, extents_of, sequences_of, spec_of, unpacked
from ...call.table import OPTIONAL
from ...errors import SpecError
from ...fragments import features
from ...runtime.run_time import FEW_SEQUENCES, SCHEDULE_BYTES, schedule_entries
from ...spec.problem import Problem
from ...spec.resolve import resolve
from .signature import Operands
from .transforms import is_transformed

# Of a forward's queries, and of a backward's keys and queries, each its part of the table.
PARTS = {"fwd": {"q_schedule": 0}, "bwd": {"kv_schedule": 1, "q_schedule": 2}}
WORDS = SCHEDULE_BYTES // 4


class Ordered(NamedTuple):
    """What an order depends on beside the lengths: the forward's problem, whether its gradients are
    to be deterministic, which may take other tiles, heads of queries and of keys, sequences."""

    problem: Problem
    deterministic: bool
    heads_q: int
    heads_kv: int
    sequences: int


def ordered_by(operands: Operands, arguments: Arguments) -> Ordered:
    """That of a call. Raises: SpecError where it has no kernels."""
    q, k, v, *rest = operands
    assert q is not None  # the operation's schema
    optional = dict(zip(OPTIONAL, rest, strict=True))
    q, k, v = unpacked(q, k, v, arguments.layout)
    (problem,) = resolve(spec_of(q, k, v, optional, arguments), features.scan())
    extents = extents_of({"q": q, "k": k}, arguments.layout)
    sequences = sequences_of(q, optional, arguments.layout)
    heads = extents["q"].heads, extents["k"].heads
    return Ordered(problem, arguments.deterministic, *heads, sequences)


class Schedule:
    """The order in which kernels work through sequences of varying lengths. The first call that is
    given it works it out on the device, later ones reuse it: those of other layers, with the same
    lengths, heads and variant, and their gradients.

        schedule = attngen.Schedule()
        for layer in layers:
            x = layer(x, schedule)  # attention(…, cu_seqlens_q=lengths, …, schedule=schedule)

    Calls that share one follow each other on one stream. Whoever changes the lengths, in place or
    not, makes another, or says `reset()`; one that is made, or reset, under the capture of a CUDA
    graph is worked out anew at each replay.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._call: Ordered | None = None
        self._lengths: tuple[Tensor | None, ...] = ()

    def reset(self) -> None:
        """Forgets the order, as the lengths have changed."""
        self._lengths = ()
        if self._table is not None:
            self._table.zero_()

    def table_of(
        self, call: Ordered, lengths: tuple[Tensor | None, ...], device: torch.device
    ) -> Tensor | None:
        """The operand of the operations, int32 [3, entries, 4]; None where they need no order,
        find that of few sequences faster than a table, or are transformed.

        call: what the order depends on beside the lengths. Raises: SpecError where another call
        has worked it out for others.
        """
        if torch.compiler.is_compiling():
            raise SpecError("schedule: compiled code orders each call itself; leave it out")
        if not call.problem.varlen or call.problem.decode or is_transformed():
            return None  # under vmap each sample may have lengths of its own
        if self._call is None:
            self._call = call
        if self._call != call:
            raise SpecError(
                "schedule: made for calls of another variant, other heads, another number of "
                "sequences or the other of deterministic and not; use one for each"
            )
        if not self._lengths:
            self._lengths = lengths
        same = (
            a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr())
            for a, b in zip(self._lengths, lengths, strict=True)
        )
        if not all(same):
            raise SpecError("schedule: made for other lengths; reset() it, or make another")
        if self._table is None and call.sequences > FEW_SEQUENCES:
            with torch.inference_mode(False):  # a call that trains may save it
                shape = table_shape(call.sequences)
                self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._table


def table_shape(sequences: int) -> tuple[int, int, int]:
    """That of a schedule's operand."""
    return 3, schedule_entries(sequences), WORDS


def table_for(schedule: Tensor | None, sequences: int, served: bool = True) -> Tensor | None:
    """The operand, where the kernels of a call read it: of few sequences they do not, nor where
    threads copy what it was made for the copy engine's tiles of."""
    return schedule if served and sequences > FEW_SEQUENCES else None


def numbers_of(schedule: Tensor | None) -> dict[str, int | float]:
    """Whether the order is kept."""
    return {"kept": int(schedule is not None)}


def sources_of(schedule: Tensor | None, direction: str) -> tuple[Source, ...]:
    """Where kernels find their parts of the table; none where it is theirs alone."""
    if schedule is None:
        return ()
    bytes_of_part = schedule.stride(0) * schedule.element_size()
    parts = PARTS[direction].items()
    return tuple((name, "schedule", part * bytes_of_part) for name, part in parts)


def violations(schedule: Tensor | None, sequences: int) -> list[str]:
    """What is wrong with the operand."""
    if schedule is None:
        return []
    shape = table_shape(sequences)
    if (schedule.dtype, tuple(schedule.shape)) == (torch.int32, shape) and (
        schedule.is_contiguous()
    ):
        return []
    return [f"schedule needs contiguous int32 {list(shape)}; pass an attngen.Schedule"]
