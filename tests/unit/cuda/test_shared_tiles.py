"""Tiles of three warpgroups that pass over blocks which none of their rows sees, beside one thread
that loads: every row once, every visible block visited, and nobody waits in a circle."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attngen import AttentionSpec
from attngen.fragments import features
from attngen.kernels.plan import plan
from attngen.spec import resolve

UNBOUNDED = 1 << 30
UNITS = 3  # warpgroups of a tile
CTAS = 2
SOURCE = """
#include "attngen/scheduler/block_range.cuh"
#include "attngen/scheduler/cut_tiles.cuh"
#include "attngen/scheduler/tile_order.cuh"
using namespace attngen;
extern "C" int tile_end(int row_block, int tiles_m, int units) {
  return end_of_tile<3>(row_block, tiles_m, units);
}
// Of one head's tiles.
extern "C" void cut_tile(int units, int ctas, int index, int* tile) {
  const CutTile found = CutTiles<3, 2>::of(units, 1, ctas).at(index);
  tile[0] = found.begin;
  tile[1] = found.end;
}
extern "C" int cut_tiles(int units, int ctas) { return CutTiles<3, 2>::of(units, 1, ctas).count(); }
extern "C" int share_end(int begin, int end, int tile_end) {
  return end_of_share({begin, begin, end, end}, tile_end);
}
"""
Tile = tuple[range, list[tuple[int, int]]]  # its blocks, and of each warpgroup first row and end
TilesOf = Callable[..., Iterator[Tile]]
WINDOWS = [*itertools.product((UNBOUNDED, 0, 1, 5), repeat=2)]
SEQUENCES = [*itertools.product((1, 2, 3, 4, 5, 6, 7, 12, 13), (1, 2, 5, 6, 9, 13), (0, 1))]


@pytest.fixture(scope="module")
def tiles_of(compile_cpp: Callable[..., Path], mask_library) -> TilesOf:
    """`tiles_of(masks, sequence, window, own, block)` → tiles of which a warpgroup has `own` rows,
    as forward/scheduler.cuh.j2 and tile.cuh.j2 find their blocks; end -1: it has no rows. Without
    masks tiles are cut for two CTAs."""
    found = ctypes.CDLL(str(compile_cpp(SOURCE)))

    def call(
        masks: tuple[str, ...], sequence: tuple[int, int, int], window: tuple[int, int],
        own: int, block: int,
    ) -> Iterator[Tile]:  # fmt: skip
        ranges = mask_library(masks).block_ranges
        units = -(-sequence[0] // own)
        tiles_m = -(-sequence[0] // (UNITS * own))
        for number in range(tiles_m if masks else found.cut_tiles(units, CTAS)):
            cut = (ctypes.c_int * 2)()
            if masks:
                cut[1] = found.tile_end(number, tiles_m, units)
                cut[0] = max(cut[1] - UNITS, 0)
            else:
                found.cut_tile(units, CTAS, number, cut)
            begin, end = cut
            first = (end - UNITS) * own
            rows = [(begin * own, min(end * own, sequence[0]) - 1)]
            low, _, _, last = ranges(sequence, window, rows, block)[0].tolist()
            blocks = range(low, max(last, low + 1))
            shares = []
            for row in range(first, end * own, own):
                if row < begin * own:
                    shares.append((row, -1))
                    continue
                rows = [(row, min(row + own, sequence[0]) - 1)]
                least, _, _, most = ranges(sequence, window, rows, block)[0].tolist()
                own_end = found.share_end(least, most, blocks.stop) if masks else blocks.stop
                shares.append((row, own_end))
            yield blocks, shares

    return call


def cases(masks: tuple[str, ...]) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    windows = WINDOWS if "window" in masks else [(UNBOUNDED, UNBOUNDED)]
    yield from itertools.product(SEQUENCES, windows)


@pytest.mark.parametrize(
    "masks",
    ((), ("causal",), ("window",), ("causal", "window")),
    ids=lambda masks: "+".join(masks) or "none",
)
def test_shared_tiles_hold_every_row_once_and_visit_what_it_sees(masks, tiles_of, defined) -> None:
    own, block = 2, 3
    for sequence, window in cases(masks):
        seen = defined(masks, sequence, window)
        rows = []
        for blocks, shares in tiles_of(masks, sequence, window, own, block):
            for first, end in shares:
                if end < 0:
                    continue
                assert blocks.start < end <= blocks.stop
                for row in range(first, min(first + own, sequence[0])):
                    rows.append(row)
                    keys = seen[row].nonzero()[0]
                    assert all(blocks.start * block <= key < end * block for key in keys)
        assert sorted(rows) == [*range(sequence[0])], (sequence, window)


@pytest.mark.parametrize("less", (1, 0))
@pytest.mark.parametrize("masks", (("causal",), ("window",), ("causal", "window")), ids="+".join)
def test_shared_tiles_rows_see_a_key_before_none_is_hidden(
    masks, less, tiles_of, mask_library, defined
) -> None:
    """Weights are taken relative to what their row saw, in tile.cuh.j2 from the block on that hides
    no key of a warpgroup's rows and of the one above: of these rows alone it would be too soon."""
    own, block = 2, 3
    blind = 0
    for sequence, window in cases(masks):
        seen = defined(masks, sequence, window)
        for blocks, shares in tiles_of(masks, sequence, window, own, block):
            for first, end in shares:
                rows = range(first, min(first + own, sequence[0]))
                if end < 0 or not rows:
                    continue
                ranges = mask_library(masks).block_ranges
                bounds = ranges(sequence, window, [(first - less, rows[-1])], block)[0].tolist()
                met = min(bounds[2], end - 1)  # in the first block maxima are found anyway
                if met > max(bounds[1], blocks.start):
                    blind += sum(not seen[row, met * block :].any() for row in rows)
    assert (blind > 0) == (less == 0)


def programs_of(tiles: list[Tile], in_turns: bool = True) -> list[list[str]]:
    """List the waits of the loading thread, the transposing warps and each warpgroup in order.

    They also fill ("+k") and release ("-k"): stages of keys, of values as they lie ("r") and
    transposed, and the queries of each. in_turns: a warpgroup without rows passes over keys and
    values alternately.
    """
    passed = ["k", "-k", "v", "-v"] if in_turns else ["k", "-k"]
    loader: list[str] = []
    transposer: list[str] = []
    warpgroups: list[list[str]] = [[] for _ in range(UNITS)]
    for blocks, shares in tiles:
        count = len(blocks)
        queries = [f"+q{i}" for i in range(UNITS)]
        loader += ["+k", *queries] + ["+k", "+r"] * (count - 1) + ["+r"]
        transposer += ["r", "+v", "-r"] * count
        for i, (program, (_, end)) in enumerate(zip(warpgroups, shares, strict=True)):
            program.append(f"q{i}")
            if end < 0:
                program += [f"-q{i}"] + passed * count
                program += [] if in_turns else ["v", "-v"] * count
                continue
            ahead = blocks.stop - end
            program += ["k", "-k"] * ahead + ["k"] + ["v", "-v"] * ahead + ["-k"]
            program += ["k", "v", "-k", "-v"] * (count - ahead - 1) + [f"-q{i}", "v", "-v"]
    return [loader, transposer, *warpgroups]


def is_done(programs: list[list[str]], stages: dict[str, int]) -> bool:
    """Whether all end, each going on as far as it can."""
    users = {name: sum(f"-{name}" in program for program in programs) for name in stages}
    places = [0] * len(programs)
    filled = dict.fromkeys(stages, 0)
    taken = [dict.fromkeys(stages, 0) for _ in programs]
    freed = [dict.fromkeys(stages, 0) for _ in programs]

    def goes_on(step: str, each: int) -> bool:
        name = step.lstrip("+-")
        if step[0] == "+":
            least = sorted((f[name] for f in freed), reverse=True)[users[name] - 1]
            if filled[name] >= least + stages[name]:
                return False
            filled[name] += 1
        elif step[0] == "-":
            freed[each][name] += 1
        else:
            if filled[name] <= taken[each][name]:
                return False
            taken[each][name] += 1
        return True

    moved = True
    while moved:
        moved = False
        for each, program in enumerate(programs):
            while places[each] < len(program) and goes_on(program[places[each]], each):
                places[each] += 1
                moved = True
    return all(place == len(program) for place, program in zip(places, programs, strict=True))


def stuck(
    tiles_of: TilesOf, stages: dict[str, int], in_turns: bool = True
) -> list[tuple[int, ...]]:
    """The calls in which somebody waits for ever, over six tiles drawn at random."""
    found: list[tuple[int, ...]] = []
    draw = random.Random(0)
    lengths = ((1, 64, 65, 130, 192, 193, 333, 700), (1, 96, 130, 1000))
    windows = [(UNBOUNDED, 0), (5, 5), (0, 0), (300, 64), (63, 300), None]
    for queries, keys, window, corner in itertools.product(*lengths, windows, (0, 1)):
        sequence = (queries, keys, corner)
        masks, bounds = (("window",), window) if window else ((), (UNBOUNDED, UNBOUNDED))
        every = [*tiles_of(masks, sequence, bounds, 64, 96)]
        tiles = [draw.choice(every) for _ in range(6)]
        if not is_done(programs_of(tiles, in_turns), stages):
            found.append((*sequence, *bounds))
    return found


def chosen_stages() -> dict[str, int]:
    (problem,) = resolve.resolve(AttentionSpec(128, dtype="e4m3", mask="causal"), features.scan())
    pipeline = plan(problem, "sm_90a").pipeline
    assert pipeline.consumers == UNITS
    rings = {"k": pipeline.k_stages, "v": pipeline.v_stages, "r": pipeline.raw_stages}
    return {**rings, **{f"q{i}": 1 for i in range(UNITS)}}


def test_shared_tiles_of_any_calls_go_on_to_the_end(tiles_of: TilesOf) -> None:
    assert not stuck(tiles_of, chosen_stages())


def test_shared_tiles_passed_over_keys_first_would_not(tiles_of: TilesOf) -> None:
    assert stuck(tiles_of, chosen_stages(), in_turns=False)
