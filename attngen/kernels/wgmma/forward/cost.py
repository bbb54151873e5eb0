"""Cost of a forward: the time of tiles of 64 query rows beside that of larger ones.

Measured times of short calls and of narrow windows on an H200 follow these estimates.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....runtime.run_time import UNBOUNDED, Extent
from ....spec.problem import Problem
from ...family import Facts
from .choices import has_narrow

QUERIES = 1024  # of a head of a sequence, at most, where a window does not bound what they see
# Scores that an SM makes in a time in which it makes one in larger tiles: of one tile alone, of two
# and of three at once.
SPEEDS = (0.6, 0.84, 0.91)
ENDS = 128  # keys that take as long as a tile's beginning and end
GAIN = 0.97  # of the time, at most, so that nothing is lost where the estimate is off


def is_short(problem: Problem, facts: Facts) -> bool:
    """Whether a call of a problem that has tiles of 64 query rows is faster with them. Never where
    it says how keys are split, which promises the same bits in batches of any size."""
    extents, scalars = facts.extents, facts.scalars
    sides = scalars.window_left, scalars.window_right
    if facts.splits or (extents["q"].seq > QUERIES and UNBOUNDED in sides):
        return False
    plain = not (problem.scores or problem.max_logit)
    largest = max(extents["q"].dim, extents["v"].dim)
    own = "window" in problem.masks and has_narrow(largest, problem.scores)
    bottom_right = scalars.bottom_right
    return prefers_short(extents, sides, bottom_right, facts.multiprocessors, plain, own)


def prefers_short(
    extents: Mapping[str, Extent],
    sides: tuple[int, int],
    bottom_right: bool,
    multiprocessors: int,
    plain: bool = False,
    window: bool = False,
) -> bool:
    """Whether tiles of 64 rows, of which an SM works on several at once, take less time than larger
    ones, which are half empty, too few for the chip, or see more keys than their rows: by the
    scores of the tiles that the busiest SM takes. sides: keys that a query sees on either side of
    its own. plain: scores are products and no more, and no maximum is asked for. window: the larger
    tiles are those for windows, each of whose warpgroups visits its own blocks."""
    q, v = extents["q"], extents["v"]
    widest = max(q.dim, v.dim)
    aligned = v.seq - q.seq if bottom_right else 0

    def work(rows: int, block: int, own: int = 0) -> tuple[int, float]:
        """Tiles of the busiest SM, and the mean scores of a tile; so many rows visit their own
        blocks, else all of the tile's."""
        own = own or rows
        count = -(-q.seq // rows)
        keys = 0
        for first in range(aligned, aligned + q.seq, own):
            last = min(first + own, aligned + q.seq) - 1
            end = -(-min(v.seq, last + sides[1] + 1) // block)
            keys += max(1, end - max(0, first - sides[0]) // block) * block
        return -(-q.batch * q.heads * count // multiprocessors), own * keys / count + rows * ENDS

    if window:
        tiles, scores = work(192 if widest > 64 else 256, 64, own=64)
    elif plain and q.dim == v.dim == 64:
        tiles, scores = work(256, 64)
    else:
        tiles, scores = work(192 if widest <= 96 else 128, 128)
    usual = tiles * scores
    masked = min(sides) < UNBOUNDED
    tiles, scores = work(64, 64 if masked or widest > 64 else 128)
    together = 3 if masked and widest <= 64 else 2
    rounds, rest = divmod(tiles, together)
    equal = rounds * together / SPEEDS[together - 1] + (rest / SPEEDS[rest - 1] if rest else 0)
    return equal * scores < GAIN * usual
