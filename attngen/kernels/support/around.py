"""Plans of the kernels around those that make a backward's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base import KernelPlan

PREPARE, CONVERT, ROW_SUMS = "bwd_prepare", "bwd_convert", "bwd_row_sums"
CLEAR = "bwd_clear"  # as PREPARE, before kernels that only add to dQ's sums
PREPARE_THREADS = 256
CONVERT_THREADS = 128  # those whose fragments a part of dQ's workspace is
PART_ROWS = 64  # of dQ's workspace
DqSplit = Literal["rows", "columns", "none", "planes", "quads"]
CLEARED: tuple[DqSplit, ...] = ("planes", "quads")  # before anything is added


@dataclass(frozen=True)
class PreparePlan(KernelPlan):
    """The kernel before: D and LSE in blocks of `row_block` queries. `turns`:
    whether it zeroes the counts of tiles that have added to each block of dQ; `zeros`: and the dQ
    of blocks that no tile visits, since no kernel converts it. `made_tile`: keys of a tile whose
    consumers make D themselves where they are first, 0 where there are none. `cta_blocks`: of the
    blocks that a CTA has."""

    arch: str
    family: str
    row_block: int
    turns: bool
    zeros: bool
    made_tile: int
    cta_blocks: int
    threads: int


@dataclass(frozen=True)
class ClearPlan(PreparePlan):
    """The kernel before those that only add to dQ's sums: it zeroes `dq_floats` of a block, too."""

    dq_floats: int


@dataclass(frozen=True)
class ConvertPlan(KernelPlan):
    """The kernel after the fused one: dQ of a block in `parts`, each 64 rows of `dq_columns`; and
    where that one may sum dK and dV, too, 64 keys of so many columns, else 0, `key_rows` a tile.
    `dq_split`: parts are rows of dQ, or columns; in `planes` lie the same elements of all threads
    next to each other, elsewhere, as in `quads`, four of a thread. Sums of the last two have been
    zeroed, those of others have counts of what was added to them. `learns`: whether it adds the
    gradients of what a score multiplies those of queries by."""

    arch: str
    family: str
    row_block: int
    parts: int
    dq_split: DqSplit
    dq_columns: int
    dk_columns: int
    dv_columns: int
    key_rows: int
    threads: int
    learns: bool = False


@dataclass(frozen=True)
class RowSumsPlan(KernelPlan):
    """The kernel that finds the sums of rows whose LSE, of a large bias, shows none: a warp has 16
    rows of a block of `row_block` queries."""

    arch: str
    family: str
    row_block: int
    threads: int

    @property
    def tile_axis(self) -> Literal["q"]:
        return "q"


AroundPlan = PreparePlan | ConvertPlan | RowSumsPlan


def row_sums_plan(arch: str, row_block: int) -> RowSumsPlan:
    """The plan of the kernel for rows of large scores, which a bias may have."""
    return RowSumsPlan(arch, ROW_SUMS, row_block, 2 * row_block)
