"""The order of tiles: every tile once, heads in groups, the longest rows first, a common tail."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
