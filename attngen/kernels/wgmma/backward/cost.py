"""Cost of a backward: orders of additions under windows, and heads that share keys.

Measured on an H200; `heads apart` in docs/results/experiments.json has calls by the second.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....runtime.run_time import Extent, Scalars
from ....spec.problem import Problem
from ...family import Facts
from .plan import BackwardPlan

# Keys of a window up to which kernels with an order are faster, by the least head dim. Measured:
# 1.05 to 1.29 times at 128, 1.08 to 1.12 at 64, 1.03 at 32, where nothing is known of wider ones.
KEYS = ((64, 1024), (1, 256))
GROUPED_SHARE = 2  # of them, where heads share keys and values: these lose with 1024
# In blocks of queries that a tile visits: what one adds to sums in memory, and the kernel that
# rounds these.
ENDS = 3
ROUNDING = 5
GAIN = 1.05  # at least, for which sums in memory are worth their while
GAIN_NARROW = 1.2  # where kernels in an order, which are that much faster, cannot part heads


def is_narrow(extents: Mapping[str, Extent], scalars: Scalars) -> bool:
    """Whether a window leaves each query so few keys that kernels with an order are faster, where
    there are any."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    most = next(most for least, most in KEYS if max(q.dim, v.dim) >= least)
    keys = scalars.window_left + scalars.window_right
    return keys <= (most if q.heads == k.heads else most // GROUPED_SHARE)


def have_few_tiles(problem: Problem, main: BackwardPlan, facts: Facts, gain: float = GAIN) -> bool:
    """Whether key heads of a call have so few tiles that tiles of query heads are faster.

    main: the plan of the kernel that would have them. gain: how much faster they have to be. Packed
    sequences count as if they were equally long.
    """
    q, k, scalars = facts.extents["q"], facts.extents["k"], facts.scalars
    sequences = scalars.sequences or k.batch
    parts = sequences // k.batch  # packed ones are one batch
    rows, row_block, causal = main.tile.n, main.row_block, "causal" in problem.masks
    tiles, blocks = (-(-x.seq // (parts * n)) for x, n in ((k, rows), (q, row_block)))
    seen = min(blocks, -(-(scalars.window_left + scalars.window_right + rows) // row_block))
    if 2 * seen < blocks:  # a window's tiles are alike
        blocks, causal = seen, False
    heads, group = k.heads * sequences, q.heads // k.heads
    return is_faster(tiles, blocks, heads, group, causal, facts.multiprocessors, gain)


def is_faster(
    tiles: int,
    blocks: int,
    key_heads: int,
    group: int,
    causal: bool,
    multiprocessors: int,
    gain: float = GAIN,
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
    return gain * apart < taken(key_heads, blocks * group)
