"""Arbitrary masks as kernels read them: a bit a score, in rows of 32-bit words."""

from __future__ import annotations

from .tensors import Described

WORD = 32
# Tiles of up to 192 columns begin inside a row, at multiples of their length, and may end beyond.
SPARE_WORDS = 4


def words_of(length: int) -> int:
    """32-bit words of a row of that many bits."""
    return -(-length // (SPARE_WORDS * WORD)) * SPARE_WORDS + SPARE_WORDS


def numbers_of(mask: Described, s_q: int, s_kv: int) -> dict[str, int]:
    """Numbers by which kernels read a mask, bool, a broadcast of [b, h, s_q, s_kv]; beside packed
    tokens, of which these are the numbers, it says itself how far it reaches.

    `attn_mask_*`: how many sequences and heads it tells apart, the queries and keys that it stands
    for, and its strides. `mask_rows_*`: the strides, in words, of its bits with a row a query
    [b or 1, h or 1, s_q or 1, words], and their number of words; `mask_columns_*`: with a row a
    key. A stride is 0 where the mask is broadcast.
    """
    missing = 4 - mask.ndim
    shape = (*(1,) * missing, *mask.shape)
    steps = (*(0,) * missing, *mask.stride())
    sizes = [size if step else 1 for size, step in zip(shape, steps, strict=True)]
    batches, heads, rows, columns = sizes
    strides = {
        f"attn_mask_stride_{axis}": step if size > 1 else 0
        for axis, size, step in zip(("batch", "head", "row", "column"), sizes, steps, strict=True)
    }
    queries = s_q if shape[2] == 1 else shape[2]
    keys = s_kv if shape[3] == 1 else shape[3]
    return {
        **strides,
        "attn_mask_batches": batches,
        "attn_mask_heads": heads,
        "attn_mask_queries": queries,
        "attn_mask_keys": keys,
        **_packed("mask_rows", (batches, heads, rows), words_of(keys)),
        **_packed("mask_columns", (batches, heads, columns), words_of(queries)),
    }


def reach_of(mask: Described) -> dict[str, int]:
    """Tokens of a packed sequence that a mask reaches at most: kernels take none of one that has
    more, of which there are no bits."""
    rows, columns = (1, 1, *mask.shape)[-2:]
    sides = {"q_longest": rows, "kv_longest": columns}
    return {name: size for name, size in sides.items() if size > 1}


def _packed(name: str, sizes: tuple[int, int, int], words: int) -> dict[str, int]:
    batch, heads, rows = sizes
    steps = {"batch": (batch, heads * rows), "head": (heads, rows), "row": (rows, 1)}
    strides = {
        f"{name}_stride_{axis}": words * step if size > 1 else 0
        for axis, (size, step) in steps.items()
    }
    return {**strides, f"{name}_words": batch * heads * rows * words}
