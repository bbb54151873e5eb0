"""Masks by their names: one, or several that intersect, in any order with one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

JOINT = "+"  # between the names of masks that intersect, and of scores that follow each other
BOTTOM_RIGHT = "_bottom_right"
PADDING_MASKS = {"padding": "none", "padding_causal": "causal"}  # and what else they mask

_UNALIGNED = ("none", "padding", "arbitrary")
PLAIN_MASKS = (
    *("none", "causal", "causal_bottom_right", "padding", "padding_causal"),
    *("padding_causal_bottom_right", "arbitrary"),
)
"""Masks that take no operands, in the order in which refusals name them."""


@dataclass(frozen=True)
class Masks:
    """The masks that `mask` asks for, taken apart.

    fragments: their names, sorted. padding: whether sequences have lengths of their own; arbitrary:
    whether it asks for an `attn_mask`; bottom_right: whether its name aligns the diagonal there.
    """

    fragments: tuple[str, ...]
    padding: bool = False
    arbitrary: bool = False
    bottom_right: bool = False

    @property
    def name(self) -> str:
        """The one string for all lists, orders and repetitions that mean these masks."""
        words = list(self.fragments)
        if self.padding:
            words = ["padding_causal" if word == "causal" else word for word in words]
            words += [] if "padding_causal" in words else ["padding"]
        words += ["arbitrary"] if self.arbitrary else []
        return (JOINT.join(sorted(words)) or "none") + BOTTOM_RIGHT * self.bottom_right


def masks_of(name: str) -> Masks:
    """The masks of a name, or of several joined by `+`, as in `causal+chunked_bottom_right`.

    The alignment is a run-time argument, so `causal` and `causal_bottom_right` are one kernel, and
    `padding` is no mask but lengths. Names that no fragment has are among its fragments.
    """
    return _PLAIN[name] if name in _PLAIN else _parse(name)


def _parse(name: str) -> Masks:
    if name.removesuffix(BOTTOM_RIGHT) in _UNALIGNED and name.endswith(BOTTOM_RIGHT):
        return Masks((name,))  # which no fragment has: alone they have no diagonal
    words, bottom_right = [], False
    for word in name.split(JOINT):
        base = word.strip().removesuffix(BOTTOM_RIGHT)
        bottom_right |= base != word.strip()
        words.append(base)
    padding = any(word in PADDING_MASKS for word in words)
    fragments = {PADDING_MASKS.get(word, word) for word in words} - {"none", "arbitrary"}
    return Masks(tuple(sorted(fragments)), padding, "arbitrary" in words, bottom_right)


_PLAIN = {name: _parse(name) for name in PLAIN_MASKS}


def band_of(mask: str, window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """Keys left and right of the diagonal that a mask's name and a window leave, both inclusive;
    None = all of them."""
    left, right = (None if side is None or side < 0 else side for side in window)
    return left, 0 if "causal" in masks_of(mask).fragments else right


def joined(names: Sequence[str]) -> str:
    """The name of a list of masks, whatever its order."""
    return masks_of(JOINT.join(names)).name if names else "none"


def without_arbitrary(name: str) -> str:
    """The name of the same masks without an arbitrary one."""
    return replace(masks_of(name), arbitrary=False).name
