"""Plan, casts: how tensors are mapped onto CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from ...targets.target import Target
from ..base import KernelPlan

LARGEST, STORE = "cast_largest", "cast_store"
TENSORS = 3  # of a launch: q, k and v
THREADS = 512  # of one CTA an SM, each of which has 64 bytes on their way


@dataclass(frozen=True)
class CastPlan(KernelPlan):
    """One of the two kernels of a cast: that finds the largest magnitudes, or that stores."""

    arch: str
    family: str
    threads: int


def cast_plans(target: Target) -> tuple[CastPlan, ...]:
    """The plans of every cast, in the order of launch."""
    return tuple(CastPlan(target.name, name, THREADS) for name in (LARGEST, STORE))
