"""Plan: how a problem is mapped onto a chip, as small structs."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.run_time import FEW_SEQUENCES, SCHEDULE_BYTES


@dataclass(frozen=True)
class Tile:
    """Query rows a CTA owns, and keys it takes at a time."""

    m: int
    n: int


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
class Schedule:
    """How tiles reach the persistent CTAs.

    `dynamic`: CTAs draw tile numbers from a counter; else they stride through them.
    Heads are worked on in groups of at most `group_heads` whose K and V together fill at most
    `kv_group_bytes` of L2. `tail_share`: that fraction of each head's row blocks (4: a quarter),
    the shortest, is kept for the end; 0 keeps none.
    """

    dynamic: bool
    longest_first: bool
    kv_group_bytes: int
    group_heads: int
    tail_share: int


@dataclass(frozen=True)
class SmemRegion:
    """A named part of shared memory; `name` completes the kernel's constant kSmem<Name>."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Plan:
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
        """CTAs an SM: as many as its registers hold, 512 for a thread of each place in a CTA."""
        pipeline = self.pipeline
        producers = self.threads // 128 - pipeline.consumers
        registers = producers * pipeline.producer_registers
        return 512 // (registers + pipeline.consumers * pipeline.consumer_registers)

    @property
    def stores_rows(self) -> bool:
        """Whether the output goes from registers to memory: shared memory has no place for it."""
        staged = any(region.name == "O" for region in self.smem)
        return not (staged or self.pipeline.output_over_q)

    @property
    def sums_stored(self) -> bool:
        """Whether weights are summed as they are stored, which is no LSE: see sm90_alone."""
        return self.family == "sm90_fwd_alone"

    @property
    def orders_few(self) -> bool:
        """Whether its CTAs find the order of few sequences themselves, and fill rows of none."""
        return has_order(self.smem)


def has_order(smem: tuple[SmemRegion, ...]) -> bool:
    """Whether there is room for the schedule of few sequences."""
    return any(region.name == "Order" for region in smem)


def score_tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a warp's part of a tile that a score reads (attngen/mma/score_tile.cuh)."""
    return rows * (32 if columns == 16 else 128 * -(-columns // 64))


def order_bytes(tail_share: int) -> int:
    """Bytes of the schedule of few sequences: a head, and of each an entry, or two."""
    return SCHEDULE_BYTES * (1 + FEW_SEQUENCES * (2 if tail_share else 1))


def lay_out(sizes: dict[str, int], small: dict[str, int] | None = None) -> tuple[SmemRegion, ...]:
    """Regions one after another, each of the given bytes: 1024-aligned, as the swizzle needs, then
    what needs no alignment but 16 bytes."""
    regions, offset = [], 0
    for name, size in sizes.items():
        regions.append(SmemRegion(name, offset, size))
        offset = -(-(offset + size) // 1024) * 1024
    for name, size in (small or {}).items():
        end = regions[-1].offset + regions[-1].bytes
        regions.append(SmemRegion(name, -(-end // 16) * 16, size))
    return tuple(regions)
