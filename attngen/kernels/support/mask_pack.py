"""Arbitrary masks: the kernel that packs a mask's bits before others read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...targets.target import Target
from ..base import KernelPlan

NAME = "mask_pack"
THREADS = 512  # of one CTA an SM


@dataclass(frozen=True)
class MaskPlan(KernelPlan):
    """The kernel that packs an arbitrary mask: a row a query where `rows`, for kernels that work
    on tiles of queries, and a row a key where `columns`, for those that work on tiles of keys."""

    arch: str
    family: str
    rows: bool
    columns: bool
    threads: int


def with_mask(found: Sequence[KernelPlan], target: Target) -> tuple[KernelPlan, ...]:
    """The plans of a problem's kernels, and before the first that reads the bits the plan of the
    kernel that packs them."""
    axes = [each.tile_axis for each in found]
    first = next(place for place, axis in enumerate(axes) if axis)
    plan = MaskPlan(target.name, NAME, "q" in axes, "kv" in axes, THREADS)
    return (*found[:first], plan, *found[first:])
