"""Arbitrary masks as kernels read them: a bit a score, in rows of 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 32
# Tiles of up to 128 columns begin inside a row, and may end beyond it.
SPARE_WORDS = 4


def words_of(length: int) -> int:
    """32-bit words of a row of that many bits."""
    return -(-length // (SPARE_WORDS * WORD)) * SPARE_WORDS + SPARE_WORDS


def pack(mask: Tensor, s_q: int, s_kv: int, *, columns: bool = False) -> Tensor:
    """The mask's bits, int32 [b or 1, h or 1, s_q or 1, words], 1 where a key takes part.

    mask: bool, a broadcast of [b, h, s_q, s_kv]; beside packed tokens, of which these are the
    numbers, it says itself how far it reaches. columns: a row is a key, its bits are queries:
    [b or 1, h or 1, s_kv or 1, words]. Bits beyond the last are 0.
    """
    rows = mask[(None,) * (4 - mask.ndim)]
    if columns:
        rows = rows.transpose(2, 3)
    length = _reach(rows.shape[3], s_q if columns else s_kv)
    if rows.shape[3] != length:
        rows = rows.expand(*rows.shape[:3], length)
    bits = pad(rows, (0, WORD * words_of(length) - length)).view(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    eights: Tensor = bits.unflatten(3, (-1, 8)) * weights
    packed = eights.sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32)


def numbers_of(shape: Sequence[int], s_q: int, s_kv: int) -> dict[str, int]:
    """What kernels know of a mask of that shape: strides of its packed rows and columns in words,
    0 where it is broadcast."""
    batch, heads, rows, columns = (*(1,) * (4 - len(shape)), *shape)
    return {
        **_strides("attn_mask", (batch, heads, rows), words_of(_reach(columns, s_kv))),
        **_strides("attn_mask_columns", (batch, heads, columns), words_of(_reach(rows, s_q))),
    }


def _reach(size: int, length: int) -> int:
    """Positions that an axis of the mask stands for."""
    return length if size == 1 else size


def _strides(name: str, sizes: tuple[int, int, int], words: int) -> dict[str, int]:
    batch, heads, rows = sizes
    steps = {"batch": (batch, heads * rows), "head": (heads, rows), "row": (rows, 1)}
    return {
        f"{name}_stride_{axis}": words * step if size > 1 else 0
        for axis, (size, step) in steps.items()
    }
