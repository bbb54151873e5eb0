"""Outputs that forwards join: what is there of a call's rows, over keys that have come before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checks import device_violations
from .tensors import TensorDesc, dtype_name, named

NAMES = ("o", "lse", "rounded", "marks")  # of its tensors, behind those of `table.INPUTS`
PAIR = 2  # elements that a thread stores at once


@dataclass(frozen=True)
class Ongoing:
    """The output and LSE of rows that a forward writes, joined with what is there if it `goes_on`.

    o: float32, of the output's shape; lse: float32 [b, h, s], which may be a part of each row of a
    tensor [b, h, room], of packed tokens [h, t]; rounded: the output in q's dtype, with the strides
    of o, None where nobody wants it. keeps: whether o is written, which nobody may want beside what
    is rounded; marks: of packed sequences whether each one's is, and whether it is rounded.
    """

    o: TensorDesc
    lse: TensorDesc
    rounded: TensorDesc | None
    marks: TensorDesc | None
    goes_on: bool
    keeps: bool

    @property
    def tensors(self) -> tuple[TensorDesc | None, ...]:
        """Its tensors, in the order of `NAMES`."""
        return self.o, self.lse, self.rounded, self.marks

    @property
    def numbers(self) -> dict[str, int | float]:
        """The numbers that kernels are told."""
        flags = {"goes_on": int(self.goes_on), "keeps_sums": int(self.keeps)}
        return {**flags, "lse_room": self._room}

    @property
    def _room(self) -> int:
        """Rows of the LSE from one head to the next."""
        *outer, rows = self.lse.shape
        *steps, _ = self.lse.strides
        known = (step for n, step in zip(reversed(outer), reversed(steps), strict=True) if n > 1)
        return next(known, rows)

    def violations(
        self, q: TensorDesc, out: TensorDesc, lse: TensorDesc, sequences: int
    ) -> Iterator[str]:
        """Faults of its tensors. q: of the call; out, lse: what the call would return; sequences:
        how many it has."""
        for name, tensor, like in (("o", self.o, out), ("lse", self.lse, lse)):
            if (dtype_name(tensor), tensor.shape) != ("float32", like.shape):
                yield f"{name} needs float32 {list(like.shape)}, got {named(tensor)}"
                return
        *steps, last = self.o.strides
        if last != 1 or any(step % PAIR for step in steps if out.shape[-1] % PAIR == 0):
            yield f"o: strides {self.o.strides}; the last must be 1, others multiples of {PAIR}"
        *outer, rows = self.lse.shape
        packed = len(outer) == 1
        room = rows if packed else self._room
        *_, heads = outer
        wanted = (room, 1) if packed else (heads * room, room, 1)
        sizes = zip(self.lse.shape, self.lse.strides, wanted, strict=True)
        if any(n > 1 and step != need for n, step, need in sizes):
            yield f"lse: strides {self.lse.strides}; heads must follow each other in equal steps"
        if self.rounded is None and not self.keeps:
            yield "an output that is not kept needs rounded"
        if (x := self.rounded) is not None:
            if (dtype_name(x), x.shape) != (dtype_name(q), out.shape):
                yield f"rounded needs {dtype_name(q)} {list(out.shape)}, got {named(x)}"
            elif x.strides != self.o.strides:
                yield f"rounded: strides {x.strides} must be those of o, {self.o.strides}"
        if (x := self.marks) is not None:
            wanted_marks = ("int32", (sequences,), (1,))
            if not packed or (dtype_name(x), x.shape, x.strides) != wanted_marks:
                yield f"marks needs contiguous int32 [b={sequences}] of packed, got {named(x)}"
            if self.rounded is None:
                yield "marks needs rounded"
        yield from device_violations({"q": q, **dict(zip(NAMES, self.tensors, strict=True))})
