"""Schedule: the order of sequences whose lengths vary, kept from one call to the next."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.schedule import Ordered, table_shape
from ...errors import SpecError
from ...runtime.run_time import FEW_SEQUENCES
from .transforms import is_transformed

_MOST_MASKS = 4  # that one holds


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

    Calls with a `mask_mod` or `block_mask` that share one find the masks of those before, a few of
    the latest, until `reset()`; where gradients keep them, they find them without one.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._call: Ordered | None = None
        self._lengths: tuple[Tensor | None, ...] = ()
        self._masks: list[Tensor] = []

    def reset(self) -> None:
        """Forgets the order, as the lengths have changed, and masks."""
        self._lengths = ()
        self._masks.clear()
        if self._table is not None:
            self._table.zero_()

    def keep(self, mask: Tensor) -> None:
        """Hold on to the mask of a call, for those that ask for the same."""
        if not any(mask is each for each in self._masks):
            self._masks = [*self._masks[1 - _MOST_MASKS :], mask]

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
