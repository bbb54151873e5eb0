"""Refusals of positions: what is none, and what does not follow them."""

from __future__ import annotations

from collections.abc import Iterator

from ..spec.masks import masks_of
from .positions import fault_of
from .table import FUNCTIONS, AttentionCall


def position_violations(call: AttentionCall, paged: bool) -> Iterator[str]:
    """Whether positions are some, and nothing is beside them that does not follow them. paged:
    whether keys lie in pages."""
    if call.positions is None:
        return
    if (fault := fault_of(call.positions)) is not None:
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
