"""The order of tiles: every tile once, heads in groups, the longest rows first, a common tail; in
waves, whose tiles keep to the same block."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen import AttentionSpec
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.spec.resolve import resolve
from tests.support.wave_kit import Drawn, descending, farthest_apart, loads

SOURCE = """
#include "attngen/scheduler/tile_order.cuh"
using namespace attngen;
extern "C" void tiles_at(const int* shape, int longest, int begin, int count, int* out) {
  TileOrder order = {};
  order.tiles_m = shape[0], order.heads = shape[1], order.total_heads = shape[2];
  order.heads_per_group = shape[3], order.tail_rows = shape[4], order.by_head = shape[5];
  for (int i = 0; i < count; ++i) {
    const TileCoord tile = longest ? order.at<true>(begin + i) : order.at<false>(begin + i);
    out[3 * i] = tile.row_block, out[3 * i + 1] = tile.head, out[3 * i + 2] = tile.batch;
  }
}
extern "C" void waves_of(int tiles_m, int ctas, int heads, int* out) {
  const TileWaves waves = tile_waves(tiles_m, ctas, heads);
  out[0] = waves.heads_per_group, out[1] = waves.count;
}
"""
# How the backward's kernel finds the tile of a number: its own lines, and what they read.
FIND = """
#include "attngen/scheduler/tile_order.cuh"
#define ATTNGEN_DEVICE
using namespace attngen;
struct Params { int kv_blocks, heads_kv, total_heads, group_size, heads_per_group, tail_rows; };
struct { int x; } gridDim;
%s
struct Scheduler {
  const Params& p;
%s
};
extern "C" void find_all(const int* numbers, int ctas, int* out) {
  const Params p = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
  gridDim = {ctas};
  for (int i = 0; i < p.kv_blocks * p.total_heads; ++i) {
    const WaveTile found = Scheduler{p}.find(i);
    out[4 * i] = found.tile.row_block, out[4 * i + 1] = found.tile.head;
    out[4 * i + 2] = found.tile.batch, out[4 * i + 3] = found.ascends;
  }
}
"""
Tile = tuple[int, int, int]  # row block, head, batch
Shape = tuple[int, int, int, int, int]  # tiles_m, heads, batches, heads_per_group, tail_rows
TilesAt = Callable[..., list[Tile]]
SHAPES: list[Shape] = [
    (tiles_m, heads, batches, group, tail)
    for tiles_m, heads, batches in itertools.product((1, 2, 5), (1, 2, 3), (1, 2, 4))
    for group in range(1, heads * batches + 2)
    for tail in range(tiles_m + 1)
]
CTAS = (1, 2, 5, 7, 132)
LONGEST = pytest.mark.parametrize("longest", (False, True), ids=("ascending", "longest_first"))


@pytest.fixture(scope="module")
def tiles_at(compile_cpp: Callable[..., Path]) -> TilesAt:
    """`tiles_at(shape, longest, begin, count, by_head)` → the tiles of those indices."""
    function = ctypes.CDLL(str(compile_cpp(SOURCE))).tiles_at

    def call(
        shape: Shape, longest: bool, begin: int, count: int, by_head: bool = False
    ) -> list[Tile]:
        tiles_m, heads, batches, group, tail = shape
        out = (ctypes.c_int * (3 * count))()
        numbers = (ctypes.c_int * 6)(tiles_m, heads, heads * batches, group, tail, by_head)
        function(numbers, longest, begin, count, out)
        return [tuple(out[3 * i : 3 * i + 3]) for i in range(count)]

    return call


def every_tile(tiles_at: TilesAt, shape: Shape, longest: bool) -> list[Tile]:
    tiles_m, heads, batches, _, _ = shape
    return tiles_at(shape, longest, 0, tiles_m * heads * batches)


def group_of(heads: int, group: int) -> Callable[[Tile], int]:
    """Which group of heads a tile belongs to."""
    return lambda tile: (tile[2] * heads + tile[1]) // group


def grouped(tiles: list[Tile], shape: Shape) -> list[Tile]:
    """The tiles that come before the common tail."""
    _, heads, batches, _, tail = shape
    return tiles[: len(tiles) - tail * heads * batches]


@LONGEST
def test_tile_order_any_shape_visits_every_tile_once(longest: bool, tiles_at: TilesAt) -> None:
    for shape in SHAPES:
        tiles_m, heads, batches, _, _ = shape
        every = itertools.product(range(tiles_m), range(heads), range(batches))
        assert sorted(every_tile(tiles_at, shape, longest)) == sorted(every), shape


@LONGEST
def test_tile_order_groups_of_heads_are_finished_in_turn(longest: bool, tiles_at: TilesAt) -> None:
    for shape in SHAPES:
        heads, group = shape[1], shape[3]
        tiles = grouped(every_tile(tiles_at, shape, longest), shape)
        groups = [*map(group_of(heads, group), tiles)]
        assert groups == sorted(groups), shape


@LONGEST
def test_tile_order_inside_a_group_heads_take_the_same_rows(longest, tiles_at: TilesAt) -> None:
    """All heads of a group in turn at one row block, then the next: longest first, or ascending."""
    for shape in SHAPES:
        heads, group = shape[1], shape[3]
        tiles = grouped(every_tile(tiles_at, shape, longest), shape)
        for _, members in itertools.groupby(tiles, group_of(heads, group)):
            keys = [(-row if longest else row, b * heads + h) for row, h, b in members]
            assert keys == sorted(keys), shape


@LONGEST
def test_tile_order_tail_takes_what_is_left_of_all_heads(longest: bool, tiles_at: TilesAt) -> None:
    """The shortest row blocks of every head come last, all heads in turn."""
    for shape in SHAPES:
        tiles_m, heads, batches, _, tail = shape
        tiles = every_tile(tiles_at, shape, longest)
        kept = tiles[len(grouped(tiles, shape)) :]
        rows = range(tail - 1, -1, -1) if longest else range(tiles_m - tail, tiles_m)
        assert kept == [(r, h, b) for r in rows for b in range(batches) for h in range(heads)]


@LONGEST
def test_tile_order_by_head_takes_sequences_as_else_heads(longest, tiles_at: TilesAt) -> None:
    for shape in SHAPES:
        tiles_m, heads, batches, group, tail = shape
        count = tiles_m * heads * batches
        turned = tiles_at((tiles_m, batches, heads, group, tail), longest, 0, count)
        found = tiles_at(shape, longest, 0, count, by_head=True)
        assert found == [(row, h, b) for row, b, h in turned], shape


@settings(deadline=None)
@given(
    tiles_m=st.integers(1, 1 << 20),
    heads=st.integers(1, 256),
    batches=st.integers(1, 4096),
    longest=st.booleans(),
    data=st.data(),
)
def test_tile_order_large_shapes_give_the_tile_of_that_rank(
    tiles_m, heads, batches, longest, data, tiles_at
) -> None:
    total = heads * batches
    tiles_m = min(tiles_m, ((1 << 31) - 1) // total)
    group, tail = data.draw(st.integers(1, total)), data.draw(st.integers(0, tiles_m))
    row, any_head = data.draw(st.integers(0, tiles_m - 1)), data.draw(st.integers(0, total - 1))
    rank = tiles_m - 1 - row if longest else row
    before = tiles_m - tail
    if rank < before:
        first = any_head // group * group
        index = before * first + rank * min(group, total - first) + any_head - first
    else:
        index = rank * total + any_head
    found = tiles_at((tiles_m, heads, batches, group, tail), longest, index, 1)
    assert found == [(row, any_head % heads, any_head // heads)]


# ---- waves of the backward's tiles of keys
Find = Callable[..., list[Drawn]]


@pytest.fixture(scope="module")
def waves_of(compile_cpp: Callable[..., Path]) -> Callable[[int, int, int], tuple[int, int]]:
    """`waves_of(tiles_m, ctas, heads)` → heads of a group, and its waves."""
    function = ctypes.CDLL(str(compile_cpp(SOURCE))).waves_of

    def call(tiles_m: int, ctas: int, heads: int) -> tuple[int, int]:
        out = (ctypes.c_int * 2)()
        function(tiles_m, ctas, heads, out)
        return out[0], out[1]

    return call


@pytest.fixture(scope="module", params=(False, True), ids=("any_order", "deterministic"))
def deterministic(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def find(compile_cpp: Callable[..., Path], deterministic: bool) -> Find:
    """`find(tiles_m, heads, batches, ctas, group_size, groups)` → all tiles, as they are drawn;
    `groups`: heads together and rows kept for the end, of what is not in waves."""
    spec = AttentionSpec(64, mask="causal", directions=("bwd",), deterministic=deterministic)
    (problem,) = resolve(spec, features.scan())
    (fused,) = (each for each in plans(problem, "sm_90a") if each.family == "sm90_bwd")
    text = render_problem(problem, fused).text
    (constant,) = (line for line in text.splitlines() if "int kShortHead =" in line)
    start = text.index("  ATTNGEN_DEVICE WaveTile find(")
    code = FIND % (constant, text[start : text.index("\n  }\n", start) + 5])
    function = ctypes.CDLL(str(compile_cpp(code))).find_all

    def call(
        tiles_m: int, heads: int, batches: int, ctas: int, group_size: int = 2,
        groups: tuple[int, int] = (1, 0),
    ) -> list[Drawn]:  # fmt: skip
        total = heads * batches
        out = (ctypes.c_int * (4 * tiles_m * total))()
        numbers = (ctypes.c_int * 6)(tiles_m, heads, total, group_size, *groups)
        function(numbers, ctas, out)
        return [(*out[i : i + 3], bool(out[i + 3])) for i in range(0, len(out), 4)]

    return call


WAVE_SHAPES = [*itertools.product((1, 2, 5, 9, 13, 40), (1, 2, 3), (1, 2, 4), CTAS)]


def test_waves_any_shape_draws_every_tile_once(find: Find) -> None:
    for tiles_m, heads, batches, ctas in WAVE_SHAPES:
        drawn = find(tiles_m, heads, batches, ctas)
        every = itertools.product(range(tiles_m), range(heads), range(batches))
        assert sorted(tile[:3] for tile in drawn) == sorted(every), (tiles_m, heads, batches, ctas)


def test_waves_rows_of_a_head_are_drawn_from_the_first_on(find: Find) -> None:
    """In an order of additions a tile waits for those of its head with smaller numbers: they have
    been drawn by then, so that none waits for one that nobody works on."""
    for tiles_m, heads, batches, ctas in WAVE_SHAPES:
        rows: dict[tuple[int, int], list[int]] = {}
        for row, head, batch, _ in find(tiles_m, heads, batches, ctas):
            rows.setdefault((head, batch), []).append(row)
        assert all(found == [*range(tiles_m)] for found in rows.values())


def test_waves_are_whole_or_as_nearly_as_heads_allow(waves_of) -> None:
    """The fewest heads whose tiles are whole waves but for a 16th, or those that are nearest."""
    for ctas, total in itertools.product((*range(1, 24), 114, 132), (1, 3, 8, 64)):
        for tiles_m in range(1, 4 * ctas):
            fewest = min(max(1, ctas // tiles_m), total)
            tried = range(fewest, min(total, fewest + 16) + 1)
            counts = {n: max(1, (n * tiles_m + ctas // 2) // ctas) for n in tried}
            off = {n: Fraction(abs(n * tiles_m - m * ctas), m * ctas) for n, m in counts.items()}
            whole = (n for n in tried if off[n] <= Fraction(1, 16))
            heads = next(whole, min(tried, key=lambda n: (off[n], n)))
            wanted = (heads, counts[heads])
            assert waves_of(tiles_m, ctas, total) == wanted, (tiles_m, ctas, total)


def test_waves_that_heads_fill_turn_with_each_group_of_them(find: Find) -> None:
    """The first one descends."""
    for tiles_m, ctas in ((1, 1), (2, 4), (5, 5), (8, 17), (33, 132), (64, 132)):
        together = ctas // tiles_m
        for row, head, batch, ascends in find(tiles_m, 3, 4, ctas):
            assert ascends == (batch * 3 + head) // together % 2, (tiles_m, ctas, row)


def test_waves_of_a_long_head_turn_inside_it(find: Find) -> None:
    for waves, ctas in ((2, 5), (3, 7), (4, 132)):
        directions = [ascends for *_, ascends in find(waves * ctas, 3, 2, ctas)]
        assert directions == [bool(n // ctas % 2) for n in range(6 * waves * ctas)]


def test_heads_alone_keep_their_groups_and_one_direction(
    find: Find, tiles_at: TilesAt, deterministic: bool
) -> None:
    """Long heads that share keys with no other: L2 holds what they read in any order."""
    for tiles_m, groups in itertools.product((16, 40), ((1, 0), (2, 0), (3, 4))):
        drawn = find(tiles_m, 3, 2, 5, group_size=1, groups=groups)
        plain = tiles_at((tiles_m, 3, 2, *groups), False, 0, len(drawn))
        assert drawn == [(*tile, not deterministic) for tile in plain]


def test_short_heads_alone_are_in_waves_unless_additions_have_an_order(
    find: Find, deterministic: bool
) -> None:
    for tiles_m in (1, 5, 15):
        alone, grouped = (find(tiles_m, 3, 4, 7, group_size=n) for n in (1, 2))
        assert (alone == grouped) == (not deterministic)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("blocks", (1, 2))
@pytest.mark.parametrize("heads", (1, 2, 3, 4))
@pytest.mark.parametrize("ctas", (24, 132))
def test_tiles_of_a_head_are_at_the_same_block_at_any_time(ctas, heads, blocks, find: Find) -> None:
    """Tiles side by side keep shared blocks in L2. If all descended, the second wave would begin at
    the end while others are at the middle."""
    for tiles_m in (ctas // heads, ctas // heads - (ctas == 132)):
        drawn = find(tiles_m, 8, 4, ctas)
        assert farthest_apart(drawn, 4 * [tiles_m], ctas, blocks) < 2 * blocks
        all_down = farthest_apart(descending(drawn), 4 * [tiles_m], ctas, blocks)
        assert all_down >= tiles_m * blocks * 3 // 4


@pytest.mark.parametrize("tiles_m", (1, 2, 11, 16, 31, 32, 42, 64, 130, 133))
def test_tiles_of_a_head_are_near_each_other_where_waves_hardly_differ_from_ctas(
    tiles_m, find: Find
) -> None:
    assert farthest_apart(find(tiles_m, 8, 4, 132), 4 * [tiles_m], 132) < 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiles_m", (32, 48, 64, 67, 80, 96, 100, 128, 160, 180, 192))
def test_waves_load_blocks_a_few_times_whatever_the_length(tiles_m, find: Find) -> None:
    """60 blocks have room for eight heads; all descending they would be loaded 7 times or
    more."""
    drawn = find(tiles_m, 8, 2, 132)
    found = loads(drawn, tiles_m, 132, 60)
    assert found < 5 and loads(descending(drawn), tiles_m, 132, 60) > 5 * found


@pytest.mark.parametrize("ctas", (12, 24, 132))
@pytest.mark.parametrize("waves", (2, 3, 4))
def test_tiles_of_a_long_head_are_at_one_block_a_direction(ctas, waves, find: Find) -> None:
    """One wave goes on to the first block as the next begins, which goes to the last."""
    tiles_m = waves * ctas
    drawn = find(tiles_m, 3, 2, ctas)
    assert farthest_apart(drawn, 2 * [tiles_m], ctas, apart=True) < 2
    assert farthest_apart(descending(drawn), 2 * [tiles_m], ctas, apart=True) >= tiles_m // 2
