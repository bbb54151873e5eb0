"""Split keys: the kernel that joins the parts of an output."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.run_time import MAX_SPLITS
from ...spec.problem import Problem
from ...targets.target import TARGETS, Target
from ..base import KernelPlan

NAME = "combine"
THREADS = 128
# Of an SM, whose registers hold so many; one less of wide rows whose last box is not whole.
CTAS, WIDE_CTAS = 10, 6
WIDE_COLUMNS = 256
BOX_COLUMNS = 64


@dataclass(frozen=True)
class CombinePlan(KernelPlan):
    """The kernel that joins the splits, a CTA a row. `ctas`: on one SM. `max_splits`: parts of a
    row, as many weights as it keeps in shared memory."""

    arch: str
    family: str
    threads: int
    ctas: int
    smem_bytes: int
    max_splits: int

    @property
    def is_dependent(self) -> bool:
        """Whether it may start before the kernel that makes the parts has ended."""
        return "griddepcontrol" in TARGETS[self.arch].instructions


def combine_plan(problem: Problem, target: Target) -> CombinePlan:
    """The plan of the kernel that joins outputs of the problem's head dim."""
    smem_bytes = 4 * MAX_SPLITS + 8 * THREADS * -(-problem.head_dim_v // BOX_COLUMNS)
    wide = problem.head_dim_v > WIDE_COLUMNS
    ctas = WIDE_CTAS - bool(problem.head_dim_v % BOX_COLUMNS) if wide else CTAS
    return CombinePlan(target.name, NAME, THREADS, ctas, smem_bytes, MAX_SPLITS)
