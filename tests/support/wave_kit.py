"""CTAs that draw tiles of keys under a causal mask, on a clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import repeat

import numpy as np

Drawn = tuple[int, int, int, bool]  # row block, head, batch, whether the first block is first


def descending(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Turn all tiles round: each begins at its last block."""
    return [(*tile, False) for *tile, _ in drawn]


def farthest_apart(
    drawn: Sequence[Drawn], tiles: Sequence[int], ctas: int, blocks: int = 1, apart: bool = False
) -> int:
    """How many blocks there are between the tiles of a head that are worked on, at the worst time.

    drawn: tiles in their order; whoever has ended one draws the next. tiles: of a head of each
    sequence; tile r of T visits blocks r * blocks up to T * blocks, one a unit of time, in its
    direction. apart: those that go up have nothing to do with those that go down.
    """
    clock = [0] * ctas
    visits: dict[tuple[int, int, bool], list[tuple[range, range]]] = {}
    for row, head, batch, ascends in drawn:
        path = range(row * blocks, tiles[batch] * blocks)
        start = heapq.heappop(clock)
        heapq.heappush(clock, start + len(path))
        times = range(start, start + len(path))
        key = head, batch, apart and ascends
        visits.setdefault(key, []).append((times, path if ascends else path[::-1]))
    return max(map(_farthest, visits.values(), repeat(max(clock))))


def _farthest(visits: Sequence[tuple[range, range]], end: int) -> int:
    first, last = np.full(end, end), np.full(end, -1)
    for times, path in visits:
        when, where = slice(times.start, times.stop), np.array(path)
        first[when] = np.minimum(first[when], where)
        last[when] = np.maximum(last[when], where)
    return int((last - first).max())


def loads(drawn: Sequence[Drawn], tiles_m: int, ctas: int, places: int) -> float:
    """How often a block is loaded where so many have a place, the one that was not read for longest
    going first. Of heads with so many tiles: as farthest_apart, a block a tile."""
    clock = [(0, cta) for cta in range(ctas)]
    visits: list[tuple[int, int, tuple[int, int, int]]] = []
    for row, head, batch, ascends in drawn:
        start, cta = heapq.heappop(clock)
        path = range(row, tiles_m) if ascends else range(tiles_m - 1, row - 1, -1)
        visits += ((start + n, cta, (head, batch, block)) for n, block in enumerate(path))
        heapq.heappush(clock, (start + len(path), cta))
    held: dict[tuple[int, int, int], None] = {}
    loaded = 0
    for *_, block in sorted(visits):
        if block in held:
            del held[block]
        else:
            loaded += 1
            if len(held) == places:
                del held[next(iter(held))]
        held[block] = None
    return loaded / len({block for *_, block in visits})
