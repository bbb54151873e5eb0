"""Batches behind left padding as packed tokens with gaps, with lengths that layers share."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import attention

TILE = 64  # queries, with the heads of a group, beyond which one CTA reads a sequence's keys
SPLIT = -1  # keys of packed tokens, into as many parts as fill the chip
_REPLACED = ("seqstart_q", "seqstart_kv", "seqused_q", "seqused_kv")
Arguments = dict[str, Any]
Kept = dict[Hashable, dict[str, Tensor]]


def attend(operands: tuple[Tensor, Tensor, Tensor], arguments: Arguments, kept: Kept | None) -> Any:
    """The output [b, s_q, h, d_v] of dense operands [b, h, s, d] whose keys begin at
    `seqstart_kv`, or a pair of it and by-products.

    Keys of single queries are read where they lie, if heads follow each other in memory, and
    positions within each: each head is a sequence then. Others are copied where positions do not
    follow each other.

    arguments: of `attention`; kept: lengths by sizes, that this has made for the same arguments;
    None of traced code, whose compiler makes alike ones once.
    """
    q, k, v = operands
    b, heads, rows, _ = q.shape
    of_keys, room = k.shape[1:3]
    rest = {name: x for name, x in arguments.items() if name not in _REPLACED}
    if rows == 1 and "dropout_p" not in arguments and k.is_contiguous() and v.is_contiguous():
        rest |= _lengths(arguments, kept, (b, of_keys, rows, room))
        return _by_key_head(q, (k, v), rest)
    q, k, v = (x.transpose(1, 2) for x in operands)
    if rows * heads <= TILE * of_keys:
        return attention(q, k, v, layout="bshd", **arguments)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    rest |= _lengths(arguments, kept, (b, 1, rows, room))
    found: Any = attention(q, k, v, layout="thd", **rest)
    if not isinstance(found, tuple):
        return found.unflatten(0, (b, rows))
    out, aux = found
    return out.unflatten(0, (b, rows)), aux


def _by_key_head(q: Tensor, keys: tuple[Tensor, Tensor], rest: Arguments) -> Tensor:
    """The output of single queries [b, h, 1, d], where each of their heads of keys is a sequence.

    rest: with lengths of these. A sink, which heads have apart, takes its share of the output.
    """
    k, v = keys
    b, heads, _, _ = q.shape
    of_keys = k.shape[1]
    rest = rest | {"layout": "thd", "num_splits": SPLIT}
    softmax, sink = rest.pop("softmax", "vanilla"), rest.pop("sink", None)
    grouped = q.reshape(b * of_keys, heads // of_keys, -1)
    k, v = (x.flatten(0, 2).unsqueeze(1) for x in keys)
    if softmax == "vanilla":
        alone: Tensor = attention(grouped, k, v, **rest)
        return alone.reshape(b, 1, heads, -1)
    out: Tensor
    out, aux = attention(grouped, k, v, **rest, return_lse=True)
    assert aux.lse is not None  # which was asked for
    seen = aux.lse.unflatten(1, (b, of_keys)).permute(1, 2, 0).flatten(1)
    empty = seen == -math.inf  # beside a sink of -inf their difference is no number, nor its slope
    share = torch.sigmoid(seen.masked_fill(empty, 0) - sink).masked_fill(empty, 0)
    share = share[:, None, :, None]
    return (out.reshape(b, 1, heads, -1) * share).to(out.dtype)


def _lengths(
    arguments: Arguments, kept: Kept | None, sizes: tuple[int, int, int, int]
) -> dict[str, Tensor]:
    """Cumulative lengths of both sides and where sequences begin, int32 [n + 1]. sizes: sequences,
    heads of each that are sequences of their own, and rows of the tensors of either side."""
    if kept is not None and sizes in kept:
        return kept[sizes]
    b, heads, *rooms = sizes
    made = {
        name: x
        for side, room in zip(("q", "kv"), rooms, strict=True)
        for name, x in _of_side(arguments, side, b, heads, room).items()
    }
    if kept is not None:
        kept[sizes] = made
    return made


def _of_side(arguments: Arguments, side: str, b: int, heads: int, room: int) -> dict[str, Tensor]:
    start, used = (arguments.get(f"{name}_{side}") for name in ("seqstart", "seqused"))
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": arguments["seqstart_kv"].device}
    begin = torch.zeros(b, **numbers) if start is None else start.clamp(0, room)
    end = torch.full((b,), room, **numbers) if used is None else used.clamp(0, room)
    begin, end = (x.repeat_interleave(heads) for x in (begin, end))
    counts = (end - begin).clamp(min=0).cumsum(0)
    rows = torch.arange(0, (b * heads + 1) * room, room, **numbers)
    return {
        f"cu_seqlens_{side}": pad(counts, (1, 0)).to(torch.int32),
        f"cu_seqlens_{side}_padded": rows + pad(begin, (0, 1)).to(torch.int32),
    }
