"""Cost of a decode: into how many parts the keys of a sequence are split.

Fitted to times on an H200, `decode_parts` of docs/results/experiments.json.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.program import KernelEntry
from ...runtime.run_time import MAX_SPLITS, row_tiles
from ..family import Facts

SPLIT_BLOCKS = 4  # of keys, at least, for each split
# Where arithmetic binds, too: of the best share, so that few parts are joined.
UNSPLIT_BUSY, SPLIT_BUSY = 0.95, 0.96
# Where memory alone binds: fitted to `decode_parts` of docs/results/experiments.json, of whose 45
# shapes the choice is on average 0.3 % behind the fastest number of parts, at most 2.3 %.
UNEVEN = 0.14  # so many of the places that CTAs leave empty are as good as taken
PART_COST = 0.006  # of the time, for each part
JOIN_BLOCKS = 1.25  # in each place, for the kernel that joins
JOIN_ROWS = 32  # of a part, in the time of a block


def places_of(reader: KernelEntry, tiles: int, facts: Facts) -> Places:
    """The CTAs of the kernel that reads keys, for so many tiles of a call."""
    sequences = facts.sequences * facts.extents["k"].heads
    slots = facts.multiprocessors * reader.ctas
    sharing = max(1, tiles // max(1, sequences))  # tiles that read the same keys
    enough = min(slots, facts.multiprocessors * reader.busy_ctas * sharing)
    return Places(slots, facts.multiprocessors, enough, sharing == 1 and enough < slots)


def splits_of(reader: KernelEntry, facts: Facts, keys: int) -> int:
    """Parts of `keys`, the most of a sequence, by which a call takes the least time."""
    q, k = facts.extents["q"], facts.extents["k"]
    tiles = row_tiles(reader, facts.extents, facts.sequences) * k.heads * q.batch
    rows = q.batch * q.heads * q.seq / max(1, tiles)
    blocks = -(-keys // reader.block_keys)
    return choose_splits(tiles, blocks, rows, places_of(reader, tiles, facts))


class Places(NamedTuple):
    """Room for CTAs on a chip: `slots` run at once, as many on each of the `multiprocessors`;
    `enough` of them keep the chip busy. `memory_binds`: each reads keys of its own and waits for
    them."""

    slots: int
    multiprocessors: int
    enough: float
    memory_binds: bool


def choose_splits(tiles: int, blocks: int, rows: float, places: Places) -> int:
    """CTAs that share the keys of one tile, each with some blocks to read. Where memory binds, the
    number that takes the least time; else one if that keeps the chip busy enough, or the fewest
    that do so about as well as any number.

    blocks: of keys, of the longest sequence; rows: of a tile, which are joined.
    """
    limit = max(1, min(blocks // SPLIT_BLOCKS, MAX_SPLITS))
    busy = [share_busy(tiles * splits, places) for splits in range(1, limit + 1)]
    if not places.memory_binds:
        if busy[0] >= UNSPLIT_BUSY * max(busy):
            return 1
        return 1 + next(n for n, share in enumerate(busy) if share >= SPLIT_BUSY * max(busy))
    times = []  # in blocks that the chip reads
    for splits, share in enumerate(busy, 1):
        read = tiles * blocks * (1 + PART_COST * splits) / share
        joined = tiles * splits * rows / JOIN_ROWS + JOIN_BLOCKS * places.slots
        times.append(read + joined * (splits > 1))
    return 1 + times.index(min(times))


def share_busy(ctas: int, places: Places) -> float:
    """The part of the time that the chip is busy, all CTAs being equal: all of it, but for those
    that do not fill their places. Where memory binds, it counts that these lie unevenly, some SMs
    having one more than others, but for CTAs that all have an SM to themselves."""
    last = ctas % places.slots
    empty = places.slots - last
    if ctas < places.slots:
        chip = places.multiprocessors
        empty = min(empty, -ctas % chip, ctas % chip) if ctas > chip else 0
    taken = max(last + UNEVEN * empty * places.memory_binds, places.enough)
    return ctas / (ctas - last + taken) if last else 1.0
