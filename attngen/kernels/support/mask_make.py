"""Masks of callables: the kernel that makes a mask's bits, and which blocks they show."""

from __future__ import annotations

from dataclasses import dataclass

from ...targets.target import Target
from ..base import KernelPlan

NAME = "mask_make"
SIDE = 4  # granules of a CTA's block, down and across, of a warp each
THREADS = 32 * SIDE * SIDE
CTAS = 2  # an SM, if programs are small


@dataclass(frozen=True)
class MakePlan(KernelPlan):
    """The kernel that evaluates a mask's program, a CTA of `threads` for a block of granules of
    queries and keys, a warp for each. ctas: of an SM, where their registers have room."""

    arch: str
    family: str
    threads: int
    ctas: int


def make_plan(target: Target) -> MakePlan:
    """The plan of every mask."""
    return MakePlan(target.name, NAME, THREADS, CTAS)
