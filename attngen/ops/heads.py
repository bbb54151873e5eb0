"""Heads: which backwards give each query head of a group key tiles of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..load import LoadedKernel
from ..run_time import Extent, blocks_of, heads_per_group

# In blocks of queries that a tile visits: what one adds to sums in memory, and the kernel that
# rounds these. Calls by them: `heads apart` in docs/results/experiments.json.
ENDS = 3
ROUNDING = 5
GAIN = 1.05  # at least, for which sums in memory are worth their while


@dataclass(frozen=True)
class Apart:
    """Tiles of query heads that share keys, each of which adds to the sums of its key head's dK and
    dV: the numbers of the kernel that makes them and of the one that rounds the sums, and the
    floats of these. None of all that where a tile visits the queries of all heads of a group."""

    main: Mapping[str, int]
    rounding: Mapping[str, int]
    floats: int

    @property
    def numbers(self) -> dict[str, int | float]:
        """What the layout of workspaces knows of it."""
        return {"dkv_floats": self.floats} if self.floats else {}


TOGETHER = Apart({}, {}, 0)


def apart_of(
    kernels: Sequence[LoadedKernel], extents: Mapping[str, Extent], causal: bool, sequences: int
) -> Apart:
    """How the tiles are made of a call that wants all gradients, by the `kernels` of its
    backward. Packed sequences count as if they were equally long."""
    main = next((each for each in kernels if each.kernel.dkv_floats), None)
    q, k = extents["q"], extents["k"]
    group = q.heads // k.heads
    if main is None or group == 1:
        return TOGETHER
    rows, parts = main.kernel.tile_rows, sequences // k.batch  # packed ones are one batch
    mean_tiles = -(-k.seq // (parts * rows))
    blocks = -(-q.seq // (parts * main.kernel.row_block))
    heads = k.heads * sequences
    if not is_faster(mean_tiles, blocks, heads, group, causal, main.multiprocessors):
        return TOGETHER
    tiles = blocks_of(k, rows, main.kernel.kv_seq, sequences)
    alone = {**extents, "k": k._replace(heads=q.heads)}
    numbers = {
        "key_group": group,
        "group_size": 1,
        "heads_kv": q.heads,
        "total_heads": q.heads * q.batch,
        "tiles": tiles * q.heads * q.batch,
        "heads_per_group": heads_per_group(main.kernel, alone),
    }
    floats = main.kernel.dkv_floats * tiles * k.heads * k.batch
    return Apart(numbers, {"key_parts": tiles * rows // 64}, floats)


def is_faster(
    tiles: int, blocks: int, key_heads: int, group: int, causal: bool, multiprocessors: int
) -> bool:
    """Whether a tile for each of a group's query heads is faster than one for all of them: key
    heads of so many tiles, which visit so many blocks of queries of each head, if `causal` half of
    them in the mean."""

    def taken(heads: int, visits: int) -> float:
        """The time of all tiles, in blocks: that of the longest at least."""
        jobs = tiles * heads
        rounds = -(-jobs // multiprocessors)
        if not causal:
            return rounds * visits
        return max(visits, jobs * visits * (1 + 1 / blocks) / 2 / multiprocessors)

    ends = ENDS * tiles * key_heads * group / multiprocessors
    apart = taken(key_heads * group, blocks) + ends + ROUNDING
    return GAIN * apart < taken(key_heads, blocks * group)
