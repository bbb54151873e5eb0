"""Masks that a kernel made before the call: their bits, and which blocks these show.

One int32 tensor [b or 1, h or 1, words] holds a plane each of what operations read as `attn_mask`:
maps of granules, a row for each granule of queries and for each of keys, then bits, a row a query
and a row a key. What tiles of keys alone read, for gradients, may be left out.

A mask whose program kernels of attention ask, [b or 1, h or 1, 1, words], has no bits: maps of all
planes, then in one place what the program reads, its numbers and captured tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .mask_bits import WORD, words_of
from .tensors import Described, dtype_name, is_contiguous

GRANULE = 64  # positions that share a bit of a map, as block_map.cuh has it
SPARE_GRANULES = 4  # rows of a map behind the last that a tile may reach
_ALIGNED = 4  # words of 16 bytes
_ASKED_AXES = 4  # of a mask that a program stands in for bits of
BITS = ("mask_rows", "mask_columns")  # parameters that lead to them, or to what stands for them
_SECTOR = 8  # words that memory moves at a time


class Parts(NamedTuple):
    """Words of a plane's parts, in their order, and of a row of each. Those of keys are none where
    they are left out."""

    row_map: int
    column_map: int
    rows: int
    columns: int
    row_map_stride: int
    column_map_stride: int
    rows_stride: int
    columns_stride: int

    @property
    def words(self) -> int:
        """Words of a plane."""
        return self.row_map + self.column_map + self.rows + self.columns

    @property
    def map_words(self) -> int:
        """Words of its maps, which are zeros before the kernel marks what it finds."""
        return self.row_map + self.column_map

    @property
    def starts(self) -> dict[str, int]:
        """The words before each part, by the names of the parameters that lead there."""
        whole = self.columns > 0
        starts = {"mask_row_map": 0, "mask_rows": self.map_words}
        others = {"mask_column_map": self.row_map, "mask_columns": self.map_words + self.rows}
        return {**starts, **(others if whole else {})}


def parts_of(s_q: int, s_kv: int, *, columns: bool) -> Parts:
    """The parts of a plane of so many queries and keys. columns: with those that gradients need."""
    q_granules, kv_granules = (-(-length // GRANULE) for length in (s_q, s_kv))
    row_map_stride, column_map_stride = _map_words(kv_granules), _map_words(q_granules)
    kept = int(columns)  # a bool times a symbol is no size to some versions of torch
    rows_stride, columns_stride = (-(-words_of(x) // _SECTOR) * _SECTOR for x in (s_kv, s_q))
    return Parts(
        row_map=(q_granules + SPARE_GRANULES) * row_map_stride,
        column_map=(kv_granules + SPARE_GRANULES) * column_map_stride * kept,
        rows=s_q * rows_stride,
        columns=s_kv * columns_stride * kept,
        row_map_stride=row_map_stride,
        column_map_stride=column_map_stride,
        rows_stride=rows_stride,
        columns_stride=columns_stride,
    )


def _map_words(granules: int) -> int:
    """Words of a map's row: bits of granules that are seen, then of those that are seen whole."""
    return 2 * -(-granules // (_ALIGNED * WORD)) * _ALIGNED


def asked_parts_of(s_q: int, s_kv: int) -> Parts:
    """The parts of a plane whose bits kernels ask a program for: maps alone."""
    whole = parts_of(s_q, s_kv, columns=True)
    return whole._replace(rows=0, columns=0)


def is_asked(mask: Described) -> bool:
    """Whether a mask that was made before has a program in place of bits."""
    return is_made(mask) and len(mask.shape) == _ASKED_AXES


def is_made(mask: Described) -> bool:
    """Whether a mask was made before, and has bits instead of booleans."""
    return dtype_name(mask) == "int32"


def violations(
    mask: Described, b: int, h: int, s_q: int, s_kv: int, *, backward: bool
) -> Iterator[str]:
    """Say what is wrong with one for calls of these sizes. backward: whether gradients read it."""
    whole, short = (parts_of(s_q, s_kv, columns=each or backward).words for each in (True, False))
    planes = [(1, b), (1, h), (whole, short)]
    shape = tuple(mask.shape)
    fits = len(shape) == 3 and all(x in sizes for x, sizes in zip(shape, planes, strict=True))
    if is_asked(mask):
        *axes, words = shape
        sides = zip(axes, ((1, b), (1, h), (1,)), strict=True)
        room = words > asked_parts_of(s_q, s_kv).map_words
        fits = room and all(x in sizes for x, sizes in sides)
    if not (fits and is_contiguous(mask)):
        yield (
            "attn_mask of int32 is one that attngen made of a mask_mod, contiguous "
            f"[1 or {b}, 1 or {h}, {whole} or {short}]; got {list(shape)}. Pass bools."
        )


def parts_in(mask: Described, s_q: int, s_kv: int) -> Parts:
    """The parts of a checked mask's planes."""
    if is_asked(mask):
        return asked_parts_of(s_q, s_kv)
    whole = parts_of(s_q, s_kv, columns=True)
    return whole if mask.shape[-1] == whole.words else parts_of(s_q, s_kv, columns=False)


def numbers_of(mask: Described, s_q: int, s_kv: int) -> dict[str, int]:
    """Numbers that kernels know of one: planes and sizes, `attn_mask_*`, and for each of its parts
    the strides, in words, 0 over a single plane."""
    batches, heads, *_ = mask.shape
    parts = parts_in(mask, s_q, s_kv)
    rows = {
        "mask_row_map": parts.row_map_stride,
        "mask_column_map": parts.column_map_stride,
        "mask_rows": parts.rows_stride,
        "mask_columns": parts.columns_stride,
    }
    numbers = {
        "attn_mask_batches": batches,
        "attn_mask_heads": heads,
        "attn_mask_queries": s_q,
        "attn_mask_keys": s_kv,
    }
    for name, stride in rows.items():
        numbers[f"{name}_stride_batch"] = heads * parts.words if batches > 1 else 0
        numbers[f"{name}_stride_head"] = parts.words if heads > 1 else 0
        numbers[f"{name}_stride_row"] = stride
    return numbers


def sources_of(mask: Described | None, s_q: int, s_kv: int) -> tuple[tuple[str, str, int], ...]:
    """Parameters that lead to its parts, each with the operand and the bytes before it; none of
    booleans."""
    if mask is None or not is_made(mask):
        return ()
    parts = parts_in(mask, s_q, s_kv)
    starts = parts.starts
    if is_asked(mask):
        state = math.prod(mask.shape[:2]) * parts.words
        starts = {"mask_row_map": 0, "mask_column_map": parts.row_map}
        starts |= dict.fromkeys((*BITS, "mask_state"), state)
    return tuple((name, "attn_mask", 4 * words) for name, words in starts.items())
