"""Masks of modules: windows, diagonals, and lengths that padding masks say."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ...errors import SpecError
from .names import AttnMaskTypes
from .variants import mask_of

Masks = Tensor | tuple[Tensor, Tensor] | None
CORNER = ("causal_bottom_right", "padding_causal_bottom_right")


def mask_name(name: str) -> str:
    """A mask's name with one spelling. Raises: AssertionError where there is none."""
    try:
        return mask_of(name)
    except KeyError:
        raise AssertionError(
            f"attn_mask_type={name!r}; allowed: {', '.join(AttnMaskTypes)}"
        ) from None


def check_set_window_size(
    attn_mask_type: str, window_size: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The window that a mask leaves: behind a causal one the right side is 0, and (−1, 0) of the
    others is all, each with a warning where another was asked for.

    Raises: AssertionError for a side that neither is 0 or more, nor means all keys.
    """
    mask = mask_name(attn_mask_type)
    causal = "causal" in mask
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    left, right = window_size
    if causal and (left, right) != (-1, -1) and (left < -1 or (left < 0 and right != 0)):
        raise AssertionError(f"window_size={window_size} under {mask!r}: needs (-1, 0) or (>=0, 0)")
    if causal and right != 0:
        warnings.warn(f"window_size={window_size} under {mask!r} is ({left}, 0)", stacklevel=2)
        return left, 0
    if causal or (left, right) == (-1, -1) or (left >= 0 and right >= 0):
        return left, right
    if (left, right) != (-1, 0):
        raise AssertionError(
            f"window_size={window_size} under {mask!r}: needs (-1, -1) or (>=0, >=0)"
        )
    warnings.warn(f"window_size={window_size} under {mask!r} is (-1, -1)", stacklevel=2)
    return -1, -1


def ends_at_corner(mask: str, *given: bool | None) -> bool:
    """Whether the diagonal ends at the last key: as causal masks' names say, of others as the first
    says that is no None, else so."""
    if mask in ("causal", "padding_causal"):
        return False
    if mask in CORNER:
        return True
    return next((each for each in given if each is not None), True)


def seqused_of(masks: Masks, side: str = "q") -> Tensor:
    """Lengths of the sequences of one side, q or kv, int32 [b], of padding masks [b, 1, 1, s], one
    for both or a pair, True where a position is padding. Raises: SpecError without one."""
    if masks is None:
        raise SpecError("a padding mask needs cu_seqlens_q and cu_seqlens_kv, or attention_mask")
    if isinstance(masks, Tensor):
        mask = masks
    else:
        of_q, of_kv = masks
        mask = of_q if side == "q" else of_kv
    return mask.logical_not().sum(-1, dtype=torch.int32).flatten()
