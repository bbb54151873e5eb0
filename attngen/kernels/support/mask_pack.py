"""Hopper, arbitrary masks: the kernel that packs a mask's bits before others read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from ..base import Plan
from ..wgmma.backward.plans import BackwardPlan, BiasPlan, RowSumsPlan
from ..wgmma.forward.plans import ARCH

THREADS = 512  # of one CTA an SM
Other = TypeVar("Other")
_READERS = (Plan, BackwardPlan, BiasPlan, RowSumsPlan)


@dataclass(frozen=True)
class MaskPlan:
    """The kernel that packs an arbitrary mask: a row a query where `rows`, for kernels that work
    on tiles of queries, and a row a key where `columns`, for those that work on tiles of keys."""

    arch: str
    family: Literal["mask_pack"]
    rows: bool
    columns: bool
    threads: int


def with_mask(found: tuple[Other, ...]) -> tuple[Other | MaskPlan, ...]:
    """The plans of a problem's kernels with that one before the first which reads the bits."""
    readers = [each for each in found if isinstance(each, _READERS)]
    of_queries = ("sm90_fwd", "sm90_bwd_dq", "sm90_bwd_dbias", "bwd_row_sums")
    queries = {each.family in of_queries for each in readers}
    first = next(place for place, each in enumerate(found) if each is readers[0])
    plan = MaskPlan(ARCH, "mask_pack", True in queries, False in queries, THREADS)
    return (*found[:first], plan, *found[first:])
