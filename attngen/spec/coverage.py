"""Coverage: a small set of calls in which every legal pair of choices meets.

A combination of fragments is a kernel, and there are too many to try each. Most mistakes need two
choices to meet, so a set that has every pair is compiled and run as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..fragments.features import Features
from .attention_spec import DTYPES_8BIT, AttentionSpec
from .problem import Problem
from .resolve import find_violations, resolve

AXES: dict[str, tuple[Any, ...]] = {
    "head_dims": ((128, 128), (64, 64), (256, 256), (192, 128), (72, 40), (512, 448)),
    "dtype": ("bf16", "fp16", "e4m3", "bf16/e4m3"),
    "mask": ("none", "causal", "causal_bottom_right"),
    "softmax": ("vanilla", "off_by_one", "learnable"),
    "layout": ("bshd", "sbhd", "bhsd", "thd"),
    "fetch": ("tma", "gather"),
    "seqused": (False, True),
    "window": (False, True),
    "alibi": (False, True),
    "softcap": (False, True),
    "max_logit": (False, True),
    "bias": ("none", "post_scale", "pre_scale"),
    "bias_shape": ("1hss", "bhss", "b1ss", "11ss", "111s"),
    "attn_mask": (False, True),
    "dropout": (False, True),
    "positions": (False, True),
    "group_size": (1, 4),
    "splits": (False, True),
    "training": (False, True),
    "deterministic": (False, True),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Member:
    """One choice on each axis. dtype: of all operands, or Q's and that of K and V; fetch: whether
    the copy engine reads the operands, or threads do; group_size: query heads that share a
    key/value head; splits: whether the forward's kernels split the keys; bias_shape: the broadcast
    of the bias, the first where there is none."""

    head_dims: tuple[int, int]
    dtype: str
    mask: str
    softmax: str
    layout: str
    fetch: str
    seqused: bool
    window: bool
    alibi: bool
    softcap: bool
    max_logit: bool
    bias: str
    bias_shape: str
    attn_mask: bool
    dropout: bool
    positions: bool
    group_size: int
    splits: bool
    training: bool
    deterministic: bool

    def __str__(self) -> str:
        d, d_v = self.head_dims
        switches = (
            *("seqused", "window", "alibi", "softcap", "max_logit", "attn_mask", "dropout"),
            *("positions", "splits", "training", "deterministic"),
        )
        words = [f"d{d}v{d_v}", self.dtype, self.mask, self.softmax, self.layout]
        words += [] if self.fetch == "tma" else [self.fetch]
        words += [] if self.bias == "none" else [f"{self.bias}_bias_{self.bias_shape}"]
        words += [f"gqa{self.group_size}", *(name for name in switches if getattr(self, name))]
        return " ".join(words)

    @property
    def spec(self) -> AttentionSpec:
        """The spec of its forward."""
        dtype, _, kv_dtype = self.dtype.partition("/")
        return AttentionSpec(
            head_dim=self.head_dims[0],
            head_dim_v=self.head_dims[1],
            dtype=dtype,
            kv_dtype=kv_dtype or None,
            layout=self.layout,
            mask=self.mask.removesuffix("_bottom_right"),
            gather=self.fetch == "gather",
            seqused=self.seqused,
            window=self.window,
            alibi=self.alibi,
            softcap=self.softcap,
            bias=self.bias,
            softmax=self.softmax,
            return_max_logit=self.max_logit,
            attn_mask=self.attn_mask,
            dropout=self.dropout,
            positions=self.positions,
            decode=self.splits,
        )

    def problems(self, known: Features) -> tuple[Problem, ...]:
        """The problems of its kernels: the forward's, and the backward's where it trains."""
        (forward,) = resolve(self.spec, known)
        joined = replace(forward, decode=False)
        backward = (joined.backward(self.deterministic),) if self.training else ()
        return (forward, *backward)


def is_legal(member: Member, known: Features) -> bool:
    """Whether there are kernels for a member; one that does not train has no order of additions,
    packed tokens say their lengths otherwise than padding does, and positions where a diagonal
    lies."""
    if member.deterministic and not member.training:
        return False
    if member.seqused and member.layout == "thd":
        return False
    if member.positions and member.mask.endswith("bottom_right"):
        return False
    if member.training and (member.dtype in DTYPES_8BIT or member.spec.widens):
        return False
    if member.bias == "none" and member.bias_shape != AXES["bias_shape"][0]:
        return False
    return not find_violations(member.spec, known)


def legal_pairs(known: Features) -> set[Pair]:
    """The pairs of choices that some legal member has, the rest of it being as plain as can be."""
    found = set()
    for one, other in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[one], AXES[other]):
            for training, bias in itertools.product((False, True), ("none", "post_scale")):
                plain = {axis: values[0] for axis, values in AXES.items()}
                chosen = {**plain, "training": training, "bias": bias, one: a, other: b}
                if is_legal(Member(**chosen), known):
                    found.add(((one, a), (other, b)))
    return found


def pairs_of(member: Member) -> set[Pair]:
    """The pairs of choices that meet in a member."""
    return set(itertools.combinations([(axis, getattr(member, axis)) for axis in AXES], 2))


def members(known: Features) -> list[Member]:
    """A set in which every legal pair meets, the same each time."""
    legal = legal_pairs(known)
    left, found = set(legal), []
    order = sorted(legal, key=repr)
    while left:
        seed = next(pair for pair in order if pair in left)
        member = _grow(dict(seed), legal, left)
        if member is None or not is_legal(member, known):
            left.discard(seed)
            continue
        found.append(member)
        left -= pairs_of(member)
    return found


def _grow(chosen: dict[str, Any], legal: set[Pair], left: set[Pair]) -> Member | None:
    """The choices completed, axis after axis, by what adds most pairs that are left."""
    for axis, values in AXES.items():
        if axis in chosen:
            continue
        best, most = None, -1
        for value in values:
            pairs = [_ordered((axis, value), other) for other in chosen.items()]
            gain = sum(pair in left for pair in pairs)
            if all(pair in legal for pair in pairs) and gain > most:
                best, most = value, gain
        if most < 0:
            return None
        chosen[axis] = best
    return Member(**chosen)


def _ordered(one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    places = list(AXES)
    return (one, other) if places.index(one[0]) < places.index(other[0]) else (other, one)


def list_coverage(known: Features) -> Iterator[str]:
    """One line a member, and how many of the legal pairs they cover."""
    chosen, legal = members(known), legal_pairs(known)
    yield from map(str, chosen)
    covered = set().union(*map(pairs_of, chosen)) & legal
    share = 100 * len(covered) / len(legal)
    yield f"coverage: {len(covered)} of {len(legal)} legal pairs, {share:.1f} %"
