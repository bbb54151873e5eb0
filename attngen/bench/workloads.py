"""Workloads: the cases that are timed, by name, and the work in each. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from ..errors import MeasureError

KI = 1024


@dataclass(frozen=True)
class Case:
    """Self-attention of one shape, bf16: `length` queries and keys in each sequence."""

    batch: int
    length: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def name(self) -> str:
        """`b2-s8k-h64/8-d128-causal`: what is after a slash is K's and V's heads, V's head dim."""
        length = f"{self.length // KI}k" if self.length % KI == 0 else str(self.length)
        heads = _pair(self.heads_q, self.heads_kv)
        dims = _pair(self.head_dim, self.head_dim_v)
        mask = "causal" if self.causal else "full"
        return f"b{self.batch}-s{length}-h{heads}-d{dims}-{mask}"


def forward_flops(case: Case) -> int:
    """FLOPs of the two products, 2·b·h·s²·(d + d_v); a causal mask leaves half."""
    dims = case.head_dim + case.head_dim_v
    full = 2 * case.batch * case.heads_q * case.length**2 * dims
    return full // 2 if case.causal else full


def backward_flops(case: Case) -> int:
    """FLOPs of five products, three over Q's head dim and two over V's: 2·b·h·s²·(3d + 2d_v), 2.5
    times the forward's where they are equal; a causal mask leaves half."""
    dims = 3 * case.head_dim + 2 * case.head_dim_v
    full = 2 * case.batch * case.heads_q * case.length**2 * dims
    return full // 2 if case.causal else full


# Direction → its work. What is recomputed, masked inside a tile or spent on exponentials is not
# counted, so that a figure says how soon the answer is there.
FLOPS: dict[str, Callable[[Case], int]] = {"fwd": forward_flops, "bwd": backward_flops}

_SHAPES = (  # batch, length, heads of Q, of K and V, head dim of Q and K, of V
    (32, 512, 16, 16, 128, 128),
    (16, 1 * KI, 16, 16, 128, 128),
    (4, 4 * KI, 16, 16, 128, 128),
    (1, 16 * KI, 16, 16, 128, 128),
    (4, 4 * KI, 32, 32, 64, 64),
    (1, 16 * KI, 32, 32, 64, 64),
    (4, 4 * KI, 8, 8, 256, 256),
    (1, 16 * KI, 8, 8, 256, 256),
    (2, 8 * KI, 64, 8, 128, 128),
    (2, 8 * KI, 16, 16, 192, 128),
)
CASES = tuple(Case(*shape, causal) for shape in _SHAPES for causal in (False, True))


def select(patterns: Sequence[str], cases: Sequence[Case] = CASES) -> tuple[Case, ...]:
    """Select cases whose names match any of the patterns. Raises: MeasureError."""
    return select_named(patterns, cases)


class Named(Protocol):
    """A case with a name to be selected by."""

    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def select_named(patterns: Sequence[str], cases: Sequence[AnyCase]) -> tuple[AnyCase, ...]:
    """The cases whose names fit one of the glob patterns, in their own order; all without any.

    Raises: MeasureError where a pattern fits none.
    """
    useless = [p for p in patterns if not any(fnmatchcase(case.name, p) for case in cases)]
    if useless:
        names = "\n".join(f"  {case.name}" for case in cases)
        raise MeasureError(f"no case fits {', '.join(map(repr, useless))}; there are:\n{names}")
    return tuple(
        case
        for case in cases
        if not patterns or any(fnmatchcase(case.name, pattern) for pattern in patterns)
    )


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}/{second}"
