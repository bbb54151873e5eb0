"""Plan, casts: how tensors are mapped onto CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ...targets.target import Target
from ..base import KernelPlan

LARGEST, STORE = "cast_largest", "cast_store"
D_O_LARGEST, D_O_STORE, NEXT_SCALES = "cast_d_o_largest", "cast_d_o_store", "cast_next_scales"
ROWS = "cast_rows"
NAMES = LARGEST, STORE, D_O_LARGEST, D_O_STORE, NEXT_SCALES, ROWS
TENSORS = 3  # of a launch: q, k and v
THREADS = 512  # of one CTA an SM, each of which has 64 bytes on their way
NEXT_THREADS = 256
MOST_NUMBERS = 256  # of a row with a scale of its own: a unit of 8 for each lane of a warp


@dataclass(frozen=True)
class CastPlan(KernelPlan):
    """One of the kernels of a cast: that finds the largest magnitudes, or that stores; that does
    both, a row at a time; or that ends a step of what a layer remembers."""

    arch: str
    family: str
    threads: int


def cast_plans(problem: Problem, target: Target) -> tuple[CastPlan, ...]:
    """The plans of every cast, in the order of launch; behind those of a backward's, that of what
    ends a step."""
    if problem.token_scales:
        return (CastPlan(target.name, ROWS, THREADS),)
    if problem.direction == "cast":
        return tuple(CastPlan(target.name, name, THREADS) for name in (LARGEST, STORE))
    casts = tuple(CastPlan(target.name, name, THREADS) for name in (D_O_LARGEST, D_O_STORE))
    return (*casts, CastPlan(target.name, NEXT_SCALES, NEXT_THREADS))
