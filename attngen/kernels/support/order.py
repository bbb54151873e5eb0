"""Hopper, variable lengths: the kernel that orders many sequences before the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..base import Plan
from ..wgmma.backward.plans import BackwardPlan
from ..wgmma.forward.plans import ARCH

THREADS = 1024  # those of one CTA sort the sequences


@dataclass(frozen=True)
class Axis:
    """Tiles of one axis that a later kernel works through: `rows` queries of a query head, or keys
    of a key/value head; of how many heads together `group_bytes` bound what they share along the
    other axis, with `sums` the float32 dQ, too, and where tiles follow a window (`follows`) its
    queries of one head; one tile of `tail_share` is kept for the end, 0 keeps none."""

    rows: int
    group_heads: int
    group_bytes: int
    sums: bool
    follows: bool
    tail_share: int


@dataclass(frozen=True)
class VarlenPlan:
    """The kernel before those of a problem whose lengths vary, where there are many sequences: it
    writes the schedules of the axes. `fills`: where the others have no registers for it, it comes
    before them whatever the number, and fills rows of the output that are of no sequence, too."""

    arch: str
    family: Literal["varlen_prepare"]
    q: Axis | None
    kv: Axis | None
    fills: bool
    threads: int


def plan(others: Iterable[object]) -> VarlenPlan:
    """The plan of that kernel for the tiles of the kernels that follow."""
    axes: dict[str, Axis] = {}
    fills = False
    for each in others:
        if isinstance(each, Plan | BackwardPlan):
            name, axis = _axis(each)
            axes[name] = axis
            fills |= not each.orders_few
    return VarlenPlan(ARCH, "varlen_prepare", axes.get("q"), axes.get("kv"), fills, THREADS)


def _axis(plan: Plan | BackwardPlan) -> tuple[str, Axis]:
    """Of query tiles heads share keys and values, of key tiles queries, output gradients and the
    sums of dQ; groups are as large as those of equal lengths. A backward's key tiles measured no
    better with the shortest kept for the end."""
    of_queries = isinstance(plan, Plan) or plan.family == "sm90_bwd_dq"
    sums = isinstance(plan, BackwardPlan) and plan.dq_floats > 0 and not of_queries
    rows = plan.tile.m if of_queries else plan.tile.n
    schedule = plan.schedule
    tail_share = schedule.tail_share if isinstance(plan, Plan) else 0
    follows = isinstance(plan, BackwardPlan) and not of_queries and plan.descending
    axis = Axis(rows, schedule.group_heads, schedule.kv_group_bytes, sums, follows, tail_share)
    return ("q" if of_queries else "kv"), axis
