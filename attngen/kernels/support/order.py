"""Variable lengths: the kernel that orders many sequences before the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...targets.target import Target
from ..base import Axis, KernelPlan

NAME = "varlen_prepare"
THREADS = 1024  # those of one CTA sort the sequences


@dataclass(frozen=True)
class VarlenPlan(KernelPlan):
    """The kernel before those of a problem whose lengths vary, where there are many sequences: it
    writes the schedules of the axes. `fills`: where the others have no registers for it, it comes
    before them whatever the number, and fills rows of the output that are of no sequence, too."""

    arch: str
    family: str
    q: Axis | None
    kv: Axis | None
    fills: bool
    threads: int


def with_order(found: Sequence[KernelPlan], target: Target) -> tuple[KernelPlan, ...]:
    """The plans of a problem's kernels behind that of the kernel which orders their tiles, where
    some are drawn in that order."""
    ordered = [each for each in found if each.ordered_axis]
    if not ordered:
        return tuple(found)
    axes = {each.tile_axis: each.ordered_axis for each in ordered}
    fills = not all(each.orders_few for each in ordered)
    plan = VarlenPlan(target.name, NAME, axes.get("q"), axes.get("kv"), fills, THREADS)
    return (plan, *found)
