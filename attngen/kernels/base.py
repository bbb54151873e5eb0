"""Plans: how a problem is mapped onto a chip, in the structs that families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..runtime.run_time import FEW_SEQUENCES, SCHEDULE_BYTES


class KernelPlan:
    """The plan of any kernel, a frozen dataclass: its architecture, its `family`, the name that
    the kernel's symbol begins with, and threads of a CTA."""

    arch: str
    family: str
    threads: int

    @property
    def tile_axis(self) -> Literal["q", "kv"] | None:
        """Whether it works on tiles of queries or of keys, whose bits of a mask it reads; None for
        a kernel that visits no scores."""
        return None

    @property
    def ordered_axis(self) -> Axis | None:
        """The tiles that it draws in the order of their sequences, where lengths vary."""
        return None

    @property
    def orders_few(self) -> bool:
        """Whether its CTAs find the order of few sequences themselves, and fill rows of none."""
        return False

    @property
    def atoms(self) -> frozenset[str]:
        """CUTLASS's headers that its source includes, by the names they are included by."""
        return frozenset()

    @property
    def moves_registers(self) -> bool:
        """Whether its warpgroups hand registers to each other, so that they have other numbers of
        them than at launch."""
        return False


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
class Tile:
    """Query rows a CTA owns, and keys it takes at a time."""

    m: int
    n: int


class TiledPlan(KernelPlan):
    """A plan of a kernel that multiplies tiles, of which a problem may have many to choose from."""

    tile: Tile


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
