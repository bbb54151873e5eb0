"""Appending to a cache, as it is defined: every token's keys and values at its place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.append import AppendCall
from .fp8 import is_fp8, quantise


class Tokens(NamedTuple):
    """New tokens, in the order of their tensor: the sequence of each, its row among the new ones,
    its position, and whether it is one, and no padding."""

    sequence: Tensor
    row: Tensor
    position: Tensor
    there: Tensor


def append(call: AppendCall) -> Tensor | None:
    """Write the call's keys and values; return its queries, rotated, None where there are none.

    A token's position is the number of tokens before it. Columns below the width of rotary_cos,
    twice over, turn in float32, where a and b of a pair become a·cos − b·sin and b·cos + a·sin,
    each product and sum rounded. Caches in 8 bits hold x · scale, saturated. Tokens without a place
    in the table, or in the cache, are left out. Nothing waits for the device.
    """
    tokens = tokens_of(call)
    new_k, new_v = (_flat(x, call.layout) for x in (call.k, call.v))
    new_k = rotated(call, new_k, tokens.position)
    for cache, new, scale in (
        (call.k_cache, new_k, call.scale_k),
        (call.v_cache, new_v, call.scale_v),
    ):
        if is_fp8(cache.dtype) and not is_fp8(new.dtype):
            factor = None if scale is None else _of_tokens(scale, tokens.sequence)
            new = quantise(new.float(), cache.dtype, factor)
        _write(cache, new.to(cache.dtype), tokens, call)
    return None if call.q is None else turned(call, tokens)


def turned(call: AppendCall, tokens: Tokens) -> Tensor:
    """The queries of a call, rotated as its new tokens are, in their dtype."""
    row = tokens.row if call.rotary_at_start else 0
    found = rotated(call, _flat(call.q, call.layout), tokens.position - row)
    return _like(found.to(call.q.dtype), call.q, call.layout)


def tokens_of(call: AppendCall) -> Tokens:
    """The new tokens of a call, int64 and bool of its tokens in a row."""
    ends = None if call.cu_seqlens is None else call.cu_seqlens.long()
    device = call.k.device
    if call.layout == "thd":
        assert ends is not None  # checked with the call
        index = torch.arange(call.k.shape[0], device=device)
        sequence = torch.searchsorted(ends[1:].contiguous(), index, right=True)
        sequence = sequence.clamp(max=max(ends.shape[0] - 2, 0))
        row = index - ends[sequence]
        there = (index < ends[-1]) & (row >= 0)  # the first sequence may begin behind padding
    else:
        b, s = (call.k.shape[call.layout.index(axis)] for axis in "bs")
        sequence = torch.arange(b, device=device).repeat_interleave(s)
        row = torch.arange(s, device=device).repeat(b)
        counts = None if ends is None else ends.diff()
        there = torch.ones_like(row, dtype=torch.bool) if counts is None else row < counts[sequence]
    if call.lengths is not None:
        before = call.lengths.long()
    else:
        assert call.cu_seqlens_all is not None  # checked with the call
        new = call.k.shape[call.layout.index("s")] if ends is None else ends.diff()
        before = call.cu_seqlens_all.long().diff() - new
    return Tokens(sequence, row, before[sequence] + row, there)


def rotated(call: AppendCall, x: Tensor, position: Tensor) -> Tensor:
    """Tokens [n, h, d] with their first columns turned, in float32; themselves where the call has
    no angles. position: [n]."""
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    place = position.clamp(0, call.rotary_cos.shape[0] - 1)
    cosine, sine = (each[place].float()[:, None] for each in (call.rotary_cos, call.rotary_sin))
    width = 2 * call.rotary_cos.shape[1]
    turning, rest = x[..., :width].float(), x[..., width:].float()
    if call.rotary_interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    parts = first * cosine - second * sine, second * cosine + first * sine
    joined = torch.stack(parts, -1).flatten(-2) if call.rotary_interleaved else torch.cat(parts, -1)
    return torch.cat([joined, rest], -1)


def _write(cache: Tensor, new: Tensor, tokens: Tokens, call: AppendCall) -> None:
    """Write tokens [n, h, d] to a cache [pages, rows, h, d]."""
    pages, page_size = cache.shape[:2]
    if not (new.numel() and cache.numel()):
        return
    column = tokens.position.div(page_size, rounding_mode="floor")
    table = call.page_table
    columns = 1 if table is None else table.shape[1]
    there = tokens.there & (tokens.position >= 0) & (column < columns)
    within = column.clamp(0, max(columns - 1, 0))
    page = tokens.sequence if table is None else table[tokens.sequence, within].long()
    there = there & (page >= 0) & (page < pages)
    page, slot = page.clamp(0, pages - 1), tokens.position.remainder(page_size)
    # Others write what the first one that is there writes; without one, what is there already.
    first = there.int().argmax().reshape(1)  # one index, which no host has to know
    stored, new = cache.view(_bits(cache)), new.view(_bits(new))
    old = stored[page[first], slot[first]]
    known = torch.where(there[first][:, None, None], new[first], old)
    page, slot = (torch.where(there, each, each[first]) for each in (page, slot))
    stored.index_put_((page, slot), torch.where(there[:, None, None], new, known))


def _bits(x: Tensor) -> torch.dtype:
    """A dtype of as many bits, of which torch has every operation."""
    return torch.uint8 if x.element_size() == 1 else x.dtype


def _of_tokens(scale: Tensor, sequence: Tensor) -> Tensor:
    """A scale, [1] or [b, h], beside tokens [n, h, d]."""
    return scale if scale.ndim == 1 else scale[sequence][..., None]


def _flat(x: Tensor, layout: str) -> Tensor:
    """Tokens in a row, [n, h, d], sequence by sequence."""
    if layout == "thd":
        return x
    return x.permute([layout.index(axis) for axis in "bshd"]).flatten(0, 1)


def _like(flat: Tensor, x: Tensor, layout: str) -> Tensor:
    """Tokens in a row as a tensor like x."""
    if layout == "thd":
        return flat
    sizes = [x.shape[layout.index(axis)] for axis in "bshd"]
    return flat.reshape(sizes).permute(["bshd".index(axis) for axis in layout]).contiguous()
