"""Refusals of positions: what is none, and what does not follow them."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.masks import masks_of
from .positions import PLACES, fault_of
from .table import FUNCTIONS, AttentionCall
from .tensors import Described, dtype_name, named


def places_violations(places: Described | None, sequences: int) -> Iterator[str]:
    """Whether places are numbers of each of so many sequences."""
    if places is None:
        return
    wanted = "int32", (sequences, PLACES), (PLACES, 1)
    if (dtype_name(places), tuple(places.shape), tuple(places.stride())) != wanted:
        yield (
            f"places needs contiguous int32 [b={sequences}, {PLACES}]; got {named(places)}. Pass "
            "first query, first key, diagonal and sequence of each sequence, or positions."
        )


def position_violations(call: AttentionCall, paged: bool) -> Iterator[str]:
    """Whether positions are some, and nothing is beside them that does not follow them. paged:
    whether keys lie in pages."""
    if call.positions is None and call.places is None:
        return
    if call.positions is not None and (fault := fault_of(call.positions)) is not None:
        yield fault
    beside = {
        "bottom_right": bool(call.bottom_right) or masks_of(call.mask).bottom_right,
        "pages": paged,
        **{name: getattr(call, name) is not None for name in FUNCTIONS},
        f"mask={call.mask!r}": bool({*masks_of(call.mask).fragments} - {"causal"}),
    }
    for name, there in beside.items():
        if there:
            yield (
                f"positions beside {name}: what that means of parts of sequences is not defined. "
                "Align with a diagonal behind the positions, or pass booleans as attn_mask."
            )
