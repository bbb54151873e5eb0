"""Masks of callables: the kernel that makes a mask's bits, and which blocks they show."""

from __future__ import annotations

from dataclasses import dataclass

from ...targets.target import Target
from ..base import KernelPlan

NAME = "mask_make"
THREADS = 768  # of one CTA an SM, which leave a thread 85 registers


@dataclass(frozen=True)
class MakePlan(KernelPlan):
    """The kernel that evaluates a mask's program, a warp for each granule of queries and keys."""

    arch: str
    family: str
    threads: int


def make_plan(target: Target) -> MakePlan:
    """The plan of every mask."""
    return MakePlan(target.name, NAME, THREADS)
