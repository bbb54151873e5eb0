"""Plan of a forward by products of warps: its values, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...base import Schedule, SmemRegion, Tile, TiledPlan
from ..atoms import ATOMS, ATOMS_FP8

FORWARD = "mma_fwd"


@dataclass(frozen=True)
class Plan(TiledPlan):
    """Everything a template needs beyond the problem. `why` explains the choices in prose.

    `warps`: of a CTA, each with `row_tiles` times 16 query rows, so that each fragment of keys or
    values that a warp reads serves all of them. `stages`: buffers of K and of V; of one, keys are
    copied under the product of values, and values under that of keys. `ctas`: of an SM.
    `column_parts`: warps that have the same rows and divide the output's columns, of which each has
    `own_columns` at most; each makes scores for itself.
    `lazy_rescale_log2`: the output is rescaled only when a row's maximum grows by more than this
    power of two. `eight_bit`: operands have 8 bits.
    """

    arch: str
    family: str
    tile: Tile
    warps: int
    row_tiles: int
    column_parts: int
    own_columns: int
    stages: int
    ctas: int
    lazy_rescale_log2: int
    eight_bit: bool
    schedule: Schedule
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int
    operand_registers: int
    why: tuple[str, ...]

    @property
    def atoms(self) -> frozenset[str]:
        return ATOMS_FP8 if self.eight_bit else ATOMS

    @property
    def tile_axis(self) -> Literal["q", "kv"] | None:
        return "q"
