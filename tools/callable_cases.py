"""Twenty masks and scores as FlexAttention's callables, for tools that time and draw them.

Each is a function of sizes that makes tensors and returns what a call gives: positions are `b`,
`h`, `i` (query) and `j` (key) in the order of FlexAttention, all int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Make = Callable[["At"], "Case"]
CAP, SOFT = 30.0, 12.0


@dataclass(frozen=True)
class At:
    """Sizes of a call, and where its tensors are; unit: tokens that stand for a page of text, a
    row of a picture or the like, of which a sequence has 64."""

    batch: int
    heads: int
    length: int
    device: str

    @property
    def unit(self) -> int:
        return self.length // 64

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers that are the same in each call with equal shapes."""
        generator = torch.Generator(self.device).manual_seed(5)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def arange(self) -> Tensor:
        """The positions of a sequence."""
        return torch.arange(self.length, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Case:
    """Arguments of a call, and others for the same.

    learned: tensors that `score_mod` captures and that get gradients; built_in: arguments that say
    the same; documents: lengths of these, where packed tokens say the same; by_sequence: whether
    `mask_mod` looks at `b`.
    """

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    learned: tuple[Tensor, ...] = ()
    built_in: dict[str, Any] = field(default_factory=dict)
    documents: tuple[int, ...] = ()
    by_sequence: bool = False


def relative(at: At) -> Case:
    """A learned number for each distance, clipped, and head."""
    most = 2 * at.unit
    table = at.randn(2 * most + 1, at.heads).requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[(j - i).clamp(-most, most) + most, h]

    return Case(score_mod, learned=(table,))


def t5_buckets(at: At) -> Case:
    """T5's 32 buckets of distances, logarithmic from 8 on, a learned number each and head."""
    table = at.randn(32, at.heads).requires_grad_()
    per_octave = 8 / math.log(128 / 8)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j - i).abs()
        large = 8 + (torch.log(distance.clamp(min=1) / 8) * per_octave).int()
        bucket = torch.where(distance < 8, distance, large.clamp(max=15))
        return score + table[torch.where(j > i, bucket + 16, bucket), h]

    return Case(score_mod, learned=(table,))


def per_query(at: At) -> Case:
    """A learned temperature for each query."""
    sharpness = (1 + 0.1 * at.randn(at.batch, at.heads, at.length)).requires_grad_()
    return Case(lambda score, b, h, i, j: score * sharpness[b, h, i], learned=(sharpness,))


def per_key(at: At) -> Case:
    """A learned number for each key."""
    weight = at.randn(at.batch, at.heads, at.length).requires_grad_()
    return Case(lambda score, b, h, i, j: score + weight[b, h, j], learned=(weight,))


def diagonals(at: At) -> Case:
    """A learned number for each distance and head."""
    last = at.length - 1
    table = at.randn(at.heads, 2 * last + 1).requires_grad_()
    return Case(lambda score, b, h, i, j: score + table[h, j - i + last], learned=(table,))


def full_bias(at: At) -> Case:
    """A learned number for each pair and head, in 16 bits."""
    table = at.randn(at.heads, at.length, at.length, dtype=torch.bfloat16).requires_grad_()
    return Case(lambda score, b, h, i, j: score + table[h, i, j], learned=(table,))


def tanh_cap(at: At) -> Case:
    """Scores that a hyperbolic tangent keeps below 30."""
    return Case(lambda score, b, h, i, j: CAP * torch.tanh(score / CAP), built_in={"softcap": CAP})


def quotient_cap(at: At) -> Case:
    """Scores that a division by themselves keeps below 12."""
    return Case(lambda score, b, h, i, j: SOFT * score / (SOFT + score.abs()))


def alibi(at: At) -> Case:
    """Scores that fall with the distance, by a slope of each head."""
    powers = -8 / at.heads * torch.arange(1, at.heads + 1, device=at.device)
    slopes = torch.exp2(powers).float()
    return Case(
        lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
        built_in={"alibi_slopes": slopes},
    )


def seasons(at: At) -> Case:
    """Scores that rise and fall with the distance, as of hours in days, by a learned swing."""
    swing, period = at.randn(at.heads).requires_grad_(), 6 * at.unit

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + swing[h] * torch.cos((i - j) % period * (2 * math.pi / period))

    return Case(score_mod, learned=(swing,))


def segment_pairs(at: At) -> Case:
    """A learned number for each pair of kinds of tokens, and head."""
    kinds = (at.arange() // (5 * at.unit)) % 3
    pair = at.randn(3, 3, at.heads).requires_grad_()
    return Case(lambda score, b, h, i, j: score + pair[kinds[i], kinds[j], h], learned=(pair,))


def documents(at: At) -> Case:
    """Documents of 700 tokens, each of which sees itself alone."""
    each = min(700, 700 * at.length // 4096)
    ids = at.arange() // each
    lengths = tuple(torch.bincount(ids).tolist())
    return Case(mask_mod=lambda b, h, i, j: ids[i] == ids[j], documents=lengths)


def dilated(at: At) -> Case:
    """Every fourth key of the last eighth of a sequence."""
    reach = 8 * at.unit

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < reach) & ((i - j) % 4 == 0)

    return Case(mask_mod=mask_mod)


def neighbourhood(at: At) -> Case:
    """Keys that are at most 6 rows and columns away, in a square picture."""
    side = math.isqrt(at.length)
    reach = 6 * side // 64 or 1

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows = (i // side - j // side).abs() <= reach
        return rows & ((i % side - j % side).abs() <= reach)

    return Case(mask_mod=mask_mod)


def tree(at: At) -> Case:
    """A tree of continuations in the order of a walk through it: tokens see those that lead to
    them."""
    ends = torch.zeros(at.length, dtype=torch.int32)

    def grow(begin: int, end: int) -> None:
        trunk = begin + max(1, (end - begin) // 4)
        ends[begin:trunk] = end
        if end - trunk < 8:
            ends[trunk:end] = end
            return
        middle = trunk + (end - trunk) * 2 // 5
        grow(trunk, middle)
        grow(middle, end)

    grow(0, at.length)
    ends = ends.to(at.device)
    return Case(mask_mod=lambda b, h, i, j: (i >= j) & (i < ends[j]))


def video(at: At) -> Case:
    """Frames of 4 rows, each of which sees itself and those before it whole."""
    frame = 4 * at.unit
    return Case(mask_mod=lambda b, h, i, j: i // frame >= j // frame)


def prefix(at: At) -> Case:
    """A prompt of each sequence that sees itself whole, and what follows it causally."""
    most = at.length // 2
    prompt = (most - 8 * at.unit * torch.arange(at.batch, device=at.device)).int()
    return Case(
        mask_mod=lambda b, h, i, j: (i >= j) | (j < prompt[b]),
        built_in={"mask": "prefix", "prefix": prompt},
        by_sequence=True,
    )


def window(at: At) -> Case:
    """The last eighth of a sequence."""
    reach = 8 * at.unit
    return Case(
        mask_mod=lambda b, h, i, j: (i >= j) & (i - j <= reach),
        built_in={"mask": "causal", "window": (reach, 0)},
    )


def global_tokens(at: At) -> Case:
    """A window to both sides, and tokens that all see and that see all."""
    reach, seen = 4 * at.unit, 2 * at.unit
    return Case(mask_mod=lambda b, h, i, j: ((i - j).abs() <= reach) | (i < seen) | (j < seen))


def chunks(at: At) -> Case:
    """Causal within chunks, as of iRoPE's local layers."""
    each = 16 * at.unit
    return Case(
        mask_mod=lambda b, h, i, j: (i >= j) & (i // each == j // each),
        built_in={"mask": ["causal", "chunked"], "chunked": each},
    )


ASKED: tuple[Make, ...] = (
    relative, t5_buckets, per_query, per_key, diagonals, full_bias, tanh_cap, quotient_cap, alibi,
    documents, dilated, neighbourhood, tree, video, prefix,
)  # fmt: skip
MORE: tuple[Make, ...] = (seasons, segment_pairs, window, global_tokens, chunks)
CASES: dict[str, Make] = {make.__name__: make for make in (*ASKED, *MORE)}
