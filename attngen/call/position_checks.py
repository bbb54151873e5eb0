"""Refusals of positions: what is none, and what does not follow them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..spec.masks import masks_of
from .positions import PLACED, PLACES, Positions, fault_of, is_within
from .table import FUNCTIONS, AttentionCall
from .tensors import Described, dtype_name, named

OUTSIDE = "is not from 0 to 2^29 - 1, or as a diagonal from -2^29."


def places_violations(places: Described | None, sequences: int) -> Iterator[str]:
    """Whether places are numbers of each of so many sequences."""
    if places is None:
        return
    sizes = sequences, PLACES
    fits = (dtype_name(places), tuple(places.shape)) == ("int32", sizes)
    steps = zip(sizes, places.stride(), (PLACES, 1), strict=True) if fits else ()
    if not fits or any(n > 1 and step != wanted for n, step, wanted in steps):
        yield (
            f"places needs contiguous int32 [b={sequences}, {PLACES}]; got {named(places)}. Pass "
            "first query, first key, diagonal and sequence of each sequence, or positions."
        )


def place_violations(places: Sequence[Sequence[int]]) -> Iterator[str]:
    """Numbers of sequences that are no positions. places: of each, once they are on the host."""
    for b, numbers in enumerate(places):
        for name, x in zip(PLACED, numbers, strict=True):
            if not is_within(name, x):
                yield f"positions of sequence {b}: {name}={x} {OUTSIDE}"


def position_violations(call: AttentionCall, paged: bool) -> Iterator[str]:
    """Whether positions are some, and nothing is beside them that does not follow them. paged:
    whether keys lie in pages."""
    if call.positions is None and call.places is None:
        return
    if call.positions is not None and (fault := fault_of(call.positions)) is not None:
        yield fault
    elif call.positions is not None and call.places is not None:
        stands = Positions.of(call.positions)
        if any(stands._replace(head=0)):
            yield (
                f"positions={tuple(stands)} beside places, which have all of them but the head. "
                "Pass one of them, or positions=(0, 0, 0, head)."
            )
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
