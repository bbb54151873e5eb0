"""Plain PyTorch for what flash-attention's functions compute: dense, packed, over a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

B, H, H_KV, S_Q, S_KV, D, D_V = 2, 4, 2, 5, 9, 16, 8
HERE: dict[str, Any] = {"backend": "reference"}
HALF: dict[str, Any] = {"causal": True, "softmax_scale": 0.2, "softcap": 3.0}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(s_q: int = S_Q, s_kv: int = S_KV, d_v: int = D) -> list[Tensor]:
    shapes = (B, s_q, H, D), (B, s_kv, H_KV, D), (B, s_kv, H_KV, d_v)
    return [randn(*shape, seed=n) for n, shape in enumerate(shapes)]


def truth(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Output [s, h, d] and LSE [h, s] of one sequence; diagonals end at the last key."""
    (s_q, heads, d), s_kv = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * given.get("softmax_scale", 1 / math.sqrt(d))
    if cap := given.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(s_q)[:, None] + s_kv - s_q
    distance = place - torch.arange(s_kv)
    if (slopes := given.get("alibi_slopes")) is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    left, right = given.get("window_size", (-1, -1))
    hidden = distance < 0 if given.get("causal") else torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance > left if left >= 0 else hidden
    hidden |= -distance > right if right >= 0 else hidden
    if chunk := given.get("attention_chunk"):
        hidden |= place.div(chunk, rounding_mode="floor") != torch.arange(s_kv) // chunk
    scores = scores.masked_fill(hidden, -math.inf)
    if (sink := given.get("s_aux")) is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(heads, s_q, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., :s_kv]
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


def of_batch(operands: list[Tensor], **given: Any) -> tuple[Tensor, ...]:
    each = [truth(*x, **given) for x in zip(*operands, strict=True)]
    return tuple(torch.stack(x) for x in zip(*each, strict=True))


def alike(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def cache_of(rows: int = 12) -> list[Tensor]:
    return [randn(B, rows, H_KV, D, seed=n).float() for n in (1, 2)]


def angles(width: int) -> dict[str, Tensor]:
    turn = torch.arange(12)[:, None] * 10.0 ** -torch.arange(width // 2)
    return {"rotary_cos": turn.cos(), "rotary_sin": turn.sin()}


def turned(x: Tensor, cosines: Tensor, sines: Tensor, places: Any, interleaved: bool) -> Tensor:
    """Columns of x [s, h, d] rotated, a pair's in each other's neighbourhood or half of w apart."""
    cosine, sine = (each[places][:, None].double() for each in (cosines, sines))
    half, out = cosine.shape[-1], x.double().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return out
