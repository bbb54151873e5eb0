"""Plan of a forward: its values, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....targets.target import TARGETS
from ...base import Axis, Schedule, SmemRegion, Tile, TiledPlan, has_order
from ..shared import PREFIX

FORWARD, SHORT, ALONE = f"{PREFIX}fwd", f"{PREFIX}fwd_short", f"{PREFIX}fwd_alone"
WIDE = f"{PREFIX}fwd_wide"


@dataclass(frozen=True)
class Pipeline:
    """Warpgroups and what they share: K/V buffers, registers a thread, the output's place.

    `raw_stages`: buffers of `raw_keys` keys of V as loaded, before a warpgroup of its own
    transposes it, or of K and of V, which it widens to 16 bits; 0 where they are used as they lie.

    `take_turns`: consumers pass a baton, so that one's softmax runs under the others' products;
    else they run freely. `q_in_registers`: queries are read from shared memory once a tile
    instead of once a block.
    `output_over_q`: the output is staged where Q lay (saves shared memory, delays the next Q).
    """

    consumers: int
    k_stages: int
    v_stages: int
    raw_stages: int
    raw_keys: int
    producer_registers: int
    consumer_registers: int
    take_turns: bool
    q_in_registers: bool
    output_over_q: bool


@dataclass(frozen=True)
class SoftmaxOrder:
    """How the softmax of a block is written down; what the compiler makes of it decides how well
    its instructions fill the time of the other warpgroups' products.

    `lazy_rescale_log2`: the output is rescaled only when a row's maximum grows by more than this
    power of two; 0 rescales always. `rescale_first`: the previous product is awaited and the
    output rescaled before the block's exponentials, else after. `pair_sums`: weights are added to
    the row's sum two at a time, else into two sums. `quarters_ahead`: so many quarters (0 to 2) of
    a block's exponentials come before the previous product is awaited, and the output is rescaled
    last, where it is rescaled lazily; 0 leaves it to the compiler. `parts`: 8-bit weights are made
    in so many parts, one's exponentials under the sums of the one before, after maxima of which the
    threads of a row know their own until one outgrows its row's; the other fields but the first say
    nothing then. 0: all at once.
    """

    lazy_rescale_log2: int
    rescale_first: bool
    pair_sums: bool
    quarters_ahead: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Plan(TiledPlan):
    """Everything a template needs beyond the problem. `why` explains the choices in prose.

    `promote_blocks`: after so many blocks the sum of 8-bit products, which the tensor cores keep
    in fewer bits than float32 has, joins a float16 mean in shared memory, where it is 1 a float32
    total in registers; 0: never.
    """

    arch: str
    family: str
    tile: Tile
    pipeline: Pipeline
    schedule: Schedule
    softmax: SoftmaxOrder
    promote_blocks: int
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int
    operand_registers: int
    why: tuple[str, ...]

    @property
    def ctas(self) -> int:
        """CTAs an SM: as many as its registers hold, shared by the threads of a warpgroup."""
        if self.shares_output:
            return 1
        pipeline, held = self.pipeline, TARGETS[self.arch].sm_registers // 128
        producers = self.threads // 128 - pipeline.consumers
        registers = producers * pipeline.producer_registers
        return held // (registers + pipeline.consumers * pipeline.consumer_registers)

    @property
    def stores_rows(self) -> bool:
        """Whether the output goes from registers to memory: shared memory has no place for it."""
        staged = any(region.name == "O" for region in self.smem)
        return not (staged or self.pipeline.output_over_q)

    @property
    def sums_stored(self) -> bool:
        """Whether weights are summed as they are stored, which is no LSE: see alone.py."""
        return self.family == ALONE

    @property
    def shares_output(self) -> bool:
        """Whether two warpgroups have the output's columns of the same rows: see wide.py."""
        return self.family == WIDE

    @property
    def pairs(self) -> bool:
        """Whether two CTAs, each of which has half of a tile's rows, load keys and values for each
        other."""
        return self.shares_output and self.tile.m > 64 * self.pipeline.consumers

    @property
    def tile_axis(self) -> Literal["q", "kv"] | None:
        return "q"

    @property
    def ordered_axis(self) -> Axis | None:
        """Tiles of queries, of which heads share keys and values."""
        schedule = self.schedule
        bounds = schedule.group_heads, schedule.kv_group_bytes
        return Axis(self.tile.m, *bounds, False, False, schedule.tail_share)

    @property
    def orders_few(self) -> bool:
        return has_order(self.smem)

    @property
    def moves_registers(self) -> bool:
        return True
