"""Plan of a backward by products of warps: its values, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...base import KernelPlan, Schedule, SmemRegion, Tile, TiledPlan
from ..atoms import ATOMS

BACKWARD, OF_BIAS, OF_LEARNED = "mma_bwd", "mma_bwd_dbias", "mma_bwd_dlearned"
ROW_BLOCK = 64  # queries a block of the workspaces, as those who convert dQ have threads for


@dataclass(frozen=True)
class Plan(TiledPlan):
    """The kernel that makes dK, dV and the sums of dQ.

    `tile`: queries a block, and keys of a CTA. `key_warps`, `query_warps`: warps that divide a
    tile's keys, and those that divide a block's queries, and the columns of dK and dV. `parts`: of
    a warp's queries, whose scores it has in turn. `dq_row_warps`: that divide the rows of dQ, whose
    columns the others divide. `stages`: buffers of queries and output gradients; of one, the next
    block is copied under the product of dQ. `late_dq`: a block's part of dQ is added beside the
    next block, so that warps meet once a block. `ctas`: of an SM. `adds_quads`: four elements of dQ
    are added to its sums at once. `deterministic`: tiles add to dQ in the order in which they are
    drawn.
    """

    arch: str
    family: str
    tile: Tile
    key_warps: int
    query_warps: int
    parts: int
    dq_row_warps: int
    stages: int
    late_dq: bool
    ctas: int
    adds_quads: bool
    deterministic: bool
    schedule: Schedule
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int
    operand_registers: int
    why: tuple[str, ...]

    @property
    def atoms(self) -> frozenset[str]:
        return ATOMS

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay with the warps that make them, as operands of products."""
        return self.query_warps == 1

    @property
    def tile_axis(self) -> Literal["kv"]:
        return "kv"


@dataclass(frozen=True)
class BiasPlan(KernelPlan):
    """The kernel of a bias's gradient, a tile of it a CTA at a time, 16 rows a warp."""

    arch: str
    family: str
    tile: Tile
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int

    @property
    def atoms(self) -> frozenset[str]:
        return ATOMS

    @property
    def tile_axis(self) -> Literal["q"]:
        return "q"


@dataclass(frozen=True)
class LearnedPlan(BiasPlan):
    """The kernel of the gradients of what a score learns, a block of queries a CTA at a time, 16
    rows a warp. `stages`: buffers of keys and values; of two, the next block is copied beside the
    products of the one at hand."""

    stages: int
