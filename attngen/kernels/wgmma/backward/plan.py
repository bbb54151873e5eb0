"""Plans of a backward's kernels: their values, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...base import Axis, KernelPlan, Schedule, SmemRegion, Tile, TiledPlan, has_order
from ...support.around import ConvertPlan, DqSplit
from ..shared import PREFIX

MAIN, WITH_BIAS = f"{PREFIX}bwd", f"{PREFIX}bwd_with_dbias"
WITH_SUMS = f"{PREFIX}bwd_with_bias_sums"  # of a bias of one row for all queries
OF_KEYS, OF_QUERIES, OF_BIAS = f"{PREFIX}bwd_dkv", f"{PREFIX}bwd_dq", f"{PREFIX}bwd_dbias"
OF_KEPT = f"{PREFIX}bwd_dq_kept"  # dQ of dS that the kernel of dK and dV has kept in memory
OF_LEARNED = f"{PREFIX}bwd_dlearned"  # of what a score captures
MAIN_8 = f"{PREFIX}bwd_fp8"  # of operands in 8 bits
FUSED = (MAIN, WITH_BIAS, WITH_SUMS, MAIN_8)  # make all gradients
PREPARE_8, CONVERT_8 = "bwd_fp8_prepare", "bwd_fp8_convert"
ROWS_PER_CONSUMER = 64


@dataclass(frozen=True)
class BackwardPlan(TiledPlan):
    """One persistent kernel of a backward.

    `q_stages`, `do_stages`: buffers for blocks of queries and output gradients; in the dQ kernel
    for blocks of keys and values. `ds_stages`: buffers for dS. `dq_split`: consumers divide dQ's
    rows or its columns, `dq_columns` each; `dk_columns` and `dv_columns` of their accumulators are
    whole steps of 16, of which the copy engine stores the head dim's. `row_block`: queries a block
    of the workspaces. `deterministic`: tiles add to dQ in the order in which they are drawn; they
    visit the last block first, or where the last tile is drawn first, `descending`, the first.
    `completes`: the tile that has the last part of a block's dQ stores it, so that no other kernel
    converts it; tiles have an order for that. `pairs`: two CTAs share a tile, and have half of the
    columns of everything each (wide.py); `sends_ahead`: what they send each other is a block ahead
    of what they need of it. `waves`: where query heads share keys, or a head has
    fewer than `short_head` tiles, tiles are drawn in waves that keep to the same block of queries
    (scheduler/tile_order.cuh). `splits_heads`: where calls have few tiles, each query head of a
    group may have tiles of its own, which add to float32 sums of dK and dV in memory. `held_steps`:
    of 16 columns of a tile's keys that consumers have in registers, too. `frees_early`: output
    gradients are freed before queries, with which D comes then, and loaded before them. `makes_d`:
    consumers make D and LSE of a tile's first blocks, one each, where no other tile visits these
    before it; the kernel before makes the rest. `starts_early`: it may start before that one has
    ended, which it awaits where it needs it. `kept_rows`: rows of a tile of dQ, where a call may
    have dS left in memory, or dQ made of them; else 0.
    """

    arch: str
    family: str
    tile: Tile
    consumers: int
    q_stages: int
    do_stages: int
    ds_stages: int
    producer_registers: int
    consumer_registers: int
    dq_split: DqSplit
    dq_columns: int
    dk_columns: int
    dv_columns: int
    row_block: int
    deterministic: bool
    completes: bool
    pairs: bool
    sends_ahead: bool
    descending: bool
    waves: bool
    short_head: int
    splits_heads: bool
    held_steps: int
    frees_early: bool
    makes_d: bool
    starts_early: bool
    kept_rows: int
    schedule: Schedule
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int

    @property
    def fused(self) -> bool:
        """Whether it makes all three gradients."""
        return self.family in FUSED

    @property
    def adds_bias(self) -> bool:
        """Whether tiles add their dS to the gradient of the bias, too, those of one sequence after
        those of the one before."""
        return self.family == WITH_BIAS

    @property
    def sums_bias(self) -> bool:
        """Whether tiles leave the sums of their dS by keys, too, those of each query head."""
        return self.family == WITH_SUMS

    @property
    def dq_floats(self) -> int:
        """Floats of dQ's workspace for one block of queries."""
        return self.consumers * ROWS_PER_CONSUMER * self.dq_columns

    @property
    def dkv_floats(self) -> int:
        """Floats of the workspace of dK and dV for one tile of keys, where heads of a group have
        tiles of their own, and as many counts of turns as there are warpgroups."""
        columns = self.dk_columns + self.dv_columns
        return self.consumers * (ROWS_PER_CONSUMER * columns + 1) * self.splits_heads

    @property
    def tile_axis(self) -> Literal["q", "kv"]:
        return "q" if self.family in (OF_QUERIES, OF_KEPT) else "kv"

    @property
    def ordered_axis(self) -> Axis:
        """Heads share keys and values along tiles of queries, and queries, output gradients and
        the sums of dQ along tiles of keys; groups are as large as those of equal lengths. Tiles of
        keys measured no better with the shortest kept for the end."""
        of_keys = self.tile_axis == "kv"
        rows = self.tile.n if of_keys else self.tile.m
        sums, follows = of_keys and self.dq_floats > 0, of_keys and self.descending
        schedule = self.schedule
        return Axis(rows, schedule.group_heads, schedule.kv_group_bytes, sums, follows, 0)

    @property
    def orders_few(self) -> bool:
        return has_order(self.smem)

    @property
    def moves_registers(self) -> bool:
        return True


@dataclass(frozen=True)
class TurningPlan(KernelPlan):
    """The kernel before one of operands in 8 bits: D and LSE in blocks of `tile.m` queries, these
    and output gradients transposed, and in tiles of `tile.n` so many columns of keys."""

    arch: str
    family: str
    tile: Tile
    key_columns: int
    smem_bytes: int
    threads: int


@dataclass(frozen=True)
class BiasGradientPlan(KernelPlan):
    """The kernel of a bias's gradient, a tile of it a CTA at a time. `stages`: buffers for queries
    with keys, and for output gradients with values, in turn."""

    arch: str
    family: str
    tile: Tile
    consumers: int
    stages: int
    producer_registers: int
    consumer_registers: int
    row_block: int
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int

    @property
    def tile_axis(self) -> Literal["q"]:
        return "q"


@dataclass(frozen=True)
class LearnedPlan(BiasGradientPlan):
    """The kernel of the gradients of what a score learns: a CTA has blocks of queries, one at a
    time, with all keys that they see."""


AnyPlan = TurningPlan | BackwardPlan | ConvertPlan | BiasGradientPlan
