"""Warpgroups that visit blocks of their own share rings of keys and values without waiting for
each other in a circle: their operations, in order, against the loaders'."""

from __future__ import annotations

import itertools
import random

import pytest

from attngen import AttentionSpec
from attngen.fragments import features
from attngen.kernels.plan import plan
from attngen.spec import resolve

BLOCK = 64


def blocks(first: int, last: int, left: int, right: int, keys: int) -> tuple[int, int]:
    """Find the blocks of so many keys that rows see, as block_range does."""
    low, high = max(first - left, 0), min(last + right + 1, keys)
    return (low // BLOCK, -(-high // BLOCK)) if low < high else (low // BLOCK, low // BLOCK)


def operations(
    tiles: list[int], warpgroup: int, of: int, queries: int, window: tuple[int, int, int]
) -> list[str]:
    """List what one of `of` warpgroups waits for and releases ("-k"); see tile.cuh.j2."""
    found: list[str] = []
    owed = 0  # values that it has yet to pass over
    for tile in tiles:
        first = tile * of * 64
        begin, end = blocks(first, min(first + of * 64, queries) - 1, *window)
        end = max(end, begin + 1)
        own = first + warpgroup * 64
        found.append("q")
        if own >= queries:
            found += ["v", "-v"] * owed + ["-q"] + ["k", "-k", "v", "-v"] * (end - begin)
            owed = 0
            continue
        low, high = blocks(own, min(own + 64, queries) - 1, *window)
        low, high = (low, high) if low < high else (end - 1, end)
        ahead, count = end - high, high - low
        found += ["k", "-k"] * ahead + ["k"] + ["v", "-v"] * (owed + ahead) + ["-k"]
        found += ["k", "v", "-v", "-k"] * (count - 1)  # keys are kept until their weights are there
        owed = low - begin
        found += ["-q", "v"] + ["k", "-k"] * owed + ["-v"]
    return found


def is_done(programs: list[list[str]], loads: int, k_stages: int, v_stages: int) -> bool:
    """Whether all end, each going on as far as it can."""
    places = [0] * len(programs)
    stages = {"k": k_stages, "v": v_stages, "q": 1}
    loaded = {"k": 0, "v": 0}
    freed = [{"k": 0, "v": 0, "q": 0} for _ in programs]
    moved = True
    while moved:
        moved = False
        for ring in loaded:
            room = min(each[ring] for each in freed) + stages[ring]
            if loaded[ring] < min(room, loads):
                loaded[ring], moved = min(room, loads), True
        for place, program in enumerate(programs):
            while places[place] < len(program):
                name = program[places[place]]
                if name in loaded and loaded[name] <= freed[place][name]:
                    break
                if name[0] == "-":
                    freed[place][name[1]] += 1
                places[place] += 1
                moved = True
    return all(place == len(program) for place, program in zip(places, programs, strict=True))


def stuck(consumers: int, k_stages: int, v_stages: int) -> list[tuple[int, ...]]:
    """The calls in which some warpgroup waits for ever, over six tiles drawn at random."""
    found: list[tuple[int, ...]] = []
    draw = random.Random(0)
    for queries, keys, left, right in itertools.product(
        (1, 64, 65, 130, 200, 700), (1, 64, 200, 1000), (0, 1, 63, 65, 300, 1 << 30), (0, 64, 300)
    ):
        tiles = [draw.randrange(-(-queries // (64 * consumers))) for _ in range(6)]
        programs = [
            operations(tiles, each, consumers, queries, (left, right, keys))
            for each in range(consumers)
        ]
        (loads,) = {program.count("k") for program in programs}
        if not is_done(programs, loads, k_stages, v_stages):
            found.append((queries, keys, left, right))
    return found


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (192, 128), (256, 256)])
def test_warpgroups_of_any_tiles_go_on_to_the_end(dims: tuple[int, int]) -> None:
    spec = AttentionSpec(dims[0], head_dim_v=dims[1], window=True)
    (problem,) = resolve.resolve(spec, features.scan())
    chosen = plan(problem, "sm_90a").pipeline
    assert not stuck(chosen.consumers, chosen.k_stages, chosen.v_stages)


def test_warpgroups_with_one_stage_of_values_would_not() -> None:
    assert stuck(3, 3, 1)
