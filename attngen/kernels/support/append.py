"""Appending: the kernel that writes new keys and values to a cache."""

from __future__ import annotations

from dataclasses import dataclass

from ...targets.target import Target
from ..base import KernelPlan

NAME = "kv_append"
THREADS = 64  # of CTAs of which an SM holds 32: steps of few tokens reach as many SMs as they can


@dataclass(frozen=True)
class AppendPlan(KernelPlan):
    """The kernel that appends, a warp for each token."""

    arch: str
    family: str
    threads: int

    @property
    def warps(self) -> int:
        """Warps of a CTA, and tokens."""
        return self.threads // 32


def append_plan(target: Target) -> AppendPlan:
    """The plan of every append."""
    return AppendPlan(target.name, NAME, THREADS)
