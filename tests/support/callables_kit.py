"""Callables in the style of FlexAttention, of models and papers, with what they capture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import logsigmoid, softplus

B, H, S = 2, 4, 96
ScoreMod = Callable[..., torch.Tensor]
SCORES: dict[str, Callable[[], ScoreMod]] = {}
_random = torch.Generator().manual_seed(2026)


def score(make: Callable[[], ScoreMod]) -> Callable[[], ScoreMod]:
    SCORES[make.__name__] = make
    return make


def normal(*shape: int, scale: float = 1.0, middle: float = 0.0) -> torch.Tensor:
    return torch.randn(*shape, generator=_random) * scale + middle


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_random).to(dtype)


@score
def tanh_cap() -> ScoreMod:
    return lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)


@score
def relative_table() -> ScoreMod:
    table = normal(33, H)
    return lambda s, b, h, i, j: s + table[(j - i).clamp(-16, 16) + 16, h]


@score
def log_distance() -> ScoreMod:
    """KERPLE's logarithmic kernel."""
    p, r = normal(H, scale=0.1, middle=0.5), normal(H, scale=0.1, middle=0.7)
    return lambda s, b, h, i, j: s - p[h] * torch.log1p(r[h] * (i - j).abs())


@score
def season() -> ScoreMod:
    swing, phase = normal(H), normal(H)
    turn = 2 * math.pi / 24
    return lambda s, b, h, i, j: s + swing[h] * torch.sin(turn * ((i - j) % 24) + phase[h])


@score
def softsign_cap() -> ScoreMod:
    return lambda s, b, h, i, j: 12.0 * s / (12.0 + s.abs())


@score
def mish() -> ScoreMod:
    return lambda s, b, h, i, j: s * torch.tanh(softplus(s))


@score
def root_of_magnitude() -> ScoreMod:
    return lambda s, b, h, i, j: torch.sign(s) * (s * s + 0.0625) ** 0.35


@score
def key_sharpness() -> ScoreMod:
    """Work on a whole captured tensor, a row of which is read by key."""
    t = normal(B, S)
    return lambda s, b, h, i, j: s * (0.5 + softplus(t)[b, j])


@score
def segment_pairs() -> ScoreMod:
    """Two gathers that choose what a third one reads."""
    kind, pair = whole(0, 3, B, S, dtype=torch.int64), normal(3, 3, H)
    return lambda s, b, h, i, j: s + pair[kind[b, i], kind[b, j], h]


@score
def log_gates() -> ScoreMod:
    """Several results of one operation, of which one counts, and an axis behind all others."""
    gate, bar = normal(B, S), normal(B, H, S)
    return lambda s, b, h, i, j: s + logsigmoid(gate[b, i] + bar[..., j][b, h])


@score
def never_nan() -> ScoreMod:
    tilt = normal(H)
    return lambda s, b, h, i, j: torch.nan_to_num(s * tilt[h], nan=0.25)


@score
def rank_two() -> ScoreMod:
    """Factors in 16 bits, strided, of which places of an axis are read by their numbers."""
    u, v = normal(H, S, 2).bfloat16(), normal(H, 2, S).bfloat16().transpose(1, 2)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return s + u[h, i, 0].float() * v[h, j, 0] + u[h, i, 1].float() * v[h, j, -1]

    return mod


@score
def weekday() -> ScoreMod:
    day = normal(7, H)
    return lambda s, b, h, i, j: s + day[(i // 24 - j // 24) % 7, h]


@score
def gaussian() -> ScoreMod:
    width, weight = normal(H, scale=2.0, middle=20.0), torch.tensor(0.75)
    return lambda s, b, h, i, j: s - weight * (i - j) ** 2 / (2.0 * width[h] ** 2)


@score
def chequered() -> ScoreMod:
    """Looks at no score: no gradient of Q and K."""
    return lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, 0.25, -0.25)


@score
def steps() -> ScoreMod:
    """A slope of 1 that is no mere sum, integers of odd kinds, and choices."""
    flag, small = whole(0, 2, S).bool(), whole(0, 100, S, dtype=torch.uint8)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        moved = s + (s > 0).float() + torch.floor(small[j] * 0.1) + ((i ^ j) & 3)
        return torch.where(flag[j] | (i == j), moved, s + torch.maximum(i, 2 * j) // 5)

    return mod


@score
def narrow() -> ScoreMod:
    """Integers of 8 and 16 bits that go round, and a product that goes beyond 32."""
    small, signed = whole(0, 255, S, dtype=torch.uint8), whole(-128, 127, S, dtype=torch.int8)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        round_ = (small[i] - small[j]) * 0.01 + signed[i] * signed[j] + (i * 40 - j).short() // 9
        return s + round_ + (i * i * i * i * (j + 4001)) % 7

    return mod


@score
def buckets() -> ScoreMod:
    """Floors of quotients that are whole, and a power of what is -1 everywhere."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        exact = torch.floor(i / 41) + ((i - j) / 47).int() + torch.floor(6 * i / (j + 1))
        return s * torch.full_like(s, -1) ** 2 * 0.5 + exact + torch.arange(3)[i % 3]

    return mod


@score
def past_ends() -> ScoreMod:
    """Indices that count from the end."""
    t = normal(S)
    return lambda s, b, h, i, j: s + t[torch.minimum(j - i, i * 0) - 1] * torch.sigmoid(s) ** 2


@score
def limits() -> ScoreMod:
    """Derivatives that autograd makes with changes in place, and a change of the function's own."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        bent = s.clamp(-1, 1.5) + torch.minimum(s, s * s) + torch.nn.functional.elu(s)
        bent += torch.nn.functional.gelu(s) * torch.clamp(i - j, max=7)
        return bent - torch.maximum(s, 0.3 * s)

    return mod


def positions(count: int) -> torch.Tensor:
    """So many random places, int32 [count, 4], of b, h, i and j."""
    sides = [torch.randint(0, size, (count,), generator=_random) for size in (B, H, S, S)]
    return torch.stack(sides, 1).int()


MASKS: dict[str, Callable[[], ScoreMod]] = {}


def mask(make: Callable[[], ScoreMod]) -> Callable[[], ScoreMod]:
    MASKS[make.__name__] = make
    return make


@mask
def chunks() -> ScoreMod:
    """Causal within chunks."""
    return lambda b, h, i, j: (i // 48 == j // 48) & (j <= i)


@mask
def axes_of_grid() -> ScoreMod:
    return lambda b, h, i, j: (i // 12 == j // 12) | (i % 12 == j % 12)


@mask
def documents() -> ScoreMod:
    """Documents, and a prefix of each sequence."""
    document, prefix = whole(0, 2, B, S).cumsum(-1), whole(1, 40, B)
    return lambda b, h, i, j: (document[b, i] == document[b, j]) | (j < prefix[b])


@mask
def growing_reach() -> ScoreMod:
    """A window of each head and sequence that grows with the position."""
    reach = whole(4, 60, B, H, dtype=torch.int16)
    return lambda b, h, i, j: 4 * (i - j).abs() < reach[b, h] + i


@mask
def buckets_of_bytes() -> ScoreMod:
    """Bytes that go round, and buckets whose bounds a last bit would move."""
    kind = whole(0, 255, S, dtype=torch.uint8)
    return lambda b, h, i, j: (kind[i] + 200 > kind[j]) | (torch.floor(i / 41) == (j / 41).int())


@mask
def hashed() -> ScoreMod:
    """A modulus that no float holds."""
    prime = 2**61 - 1
    return lambda b, h, i, j: (i + 1).long() * 923456789123457 * (j + 7) % prime % 2 == 0


@mask
def looks_back() -> ScoreMod:
    """Reads what is not there where it hides."""
    open_ = whole(0, 2, S).bool()
    return lambda b, h, i, j: (j >= 5) & open_[j + i - i - 5] & torch.logical_not(i < j - 30)


@mask
def all_of_them() -> ScoreMod:
    return lambda b, h, i, j: b.new_ones((), dtype=torch.bool)
