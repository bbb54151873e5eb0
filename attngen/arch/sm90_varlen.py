"""Hopper (sm_90a), variable lengths: the kernel that runs before the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..problem import DTYPE_BYTES, Problem
from .base import Plan
from .sm90 import ARCH
from .sm90_bwd import BackwardPlan

THREADS = 1024  # those of one CTA sort the sequences


@dataclass(frozen=True)
class Axis:
    """Tiles of one axis that a later kernel works through: `rows` queries of a query head, or keys
    of a key/value head; of how many heads together `group_bytes` bound what they share, at
    `row_bytes` a position of the other axis; one tile of `tail_share` is kept for the end, 0
    keeps none."""

    rows: int
    group_heads: int
    group_bytes: int
    row_bytes: int
    tail_share: int


@dataclass(frozen=True)
class VarlenPlan:
    """The kernel before those of a problem whose lengths vary: it writes the schedules of the axes
    and fills rows that belong to no sequence: of the output, or of the gradients."""

    arch: str
    family: Literal["varlen_prepare"]
    q: Axis | None
    kv: Axis | None
    threads: int


def plan(problem: Problem, others: Iterable[object]) -> VarlenPlan:
    """The plan of that kernel for the tiles of the kernels that follow."""
    axes: dict[str, Axis] = {}
    for each in others:
        if isinstance(each, Plan | BackwardPlan):
            name, axis = _axis(problem, each)
            axes[name] = axis
    return VarlenPlan(ARCH, "varlen_prepare", axes.get("q"), axes.get("kv"), THREADS)


def _axis(problem: Problem, plan: Plan | BackwardPlan) -> tuple[str, Axis]:
    """Of query tiles heads share keys and values, of key tiles queries, output gradients and the
    sums of dQ; groups are as large as those of equal lengths. A backward's key tiles measured no
    better with the shortest kept for the end."""
    of_queries = isinstance(plan, Plan) or plan.family == "sm90_bwd_dq"
    row_bytes = (problem.head_dim_qk + problem.head_dim_v) * DTYPE_BYTES[problem.dtype_q]
    if isinstance(plan, BackwardPlan) and plan.dq_floats and not of_queries:
        row_bytes += problem.head_dim_qk * 4
    rows = plan.tile.m if of_queries else plan.tile.n
    schedule = plan.schedule
    tail_share = schedule.tail_share if isinstance(plan, Plan) else 0
    axis = Axis(rows, schedule.group_heads, schedule.kv_group_bytes, row_bytes, tail_share)
    return ("q" if of_queries else "kv"), axis
