"""Tiles of two sizes for persistent CTAs: every row once, small ones in one round at the end."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

UNITS, SMALL = 3, 2
SOURCE = """
#include "attngen/scheduler/cut_tiles.cuh"
using namespace attngen;
extern "C" int tiles_of(int units, int heads, int ctas, int* found) {
  const auto tiles = CutTiles<3, 2>::of(units, heads, ctas);
  for (int i = 0; i < tiles.count(); ++i) {
    const CutTile tile = tiles.at(i);
    found[3 * i] = tile.head;
    found[3 * i + 1] = tile.begin;
    found[3 * i + 2] = tile.end;
  }
  return tiles.count();
}
"""
Tile = tuple[int, int, int]  # head, first unit, the one behind the last
TilesOf = Callable[[int, int, int], list[Tile]]


@pytest.fixture(scope="module")
def tiles_of(compile_cpp: Callable[..., Path]) -> TilesOf:
    library = ctypes.CDLL(str(compile_cpp(SOURCE)))

    def call(units: int, heads: int, ctas: int) -> list[Tile]:
        found = (ctypes.c_int * (3 * units * heads))()
        count = library.tiles_of(units, heads, ctas, found)
        assert count <= units * heads
        return [(found[3 * i], found[3 * i + 1], found[3 * i + 2]) for i in range(count)]

    return call


def is_large(tile: Tile) -> bool:
    return tile[2] - tile[1] == UNITS


def test_cut_tiles_of_any_shape_hold_every_unit_once_large_ones_first(tiles_of: TilesOf) -> None:
    for units, heads, ctas in itertools.product(range(1, 41), (1, 2, 3, 5, 8), (1, 2, 4, 5, 132)):
        tiles = tiles_of(units, heads, ctas)
        held = sorted((head, unit) for head, *ends in tiles for unit in range(*ends))
        assert held == [*itertools.product(range(heads), range(units))], (units, heads, ctas)
        large = [is_large(tile) for tile in tiles]
        assert large == sorted(large, reverse=True), (units, heads, ctas)
        assert all(end - begin <= UNITS for _, begin, end in tiles)


def test_cut_tiles_leave_each_cta_at_most_one_small_tile_more(tiles_of: TilesOf) -> None:
    """Where more than what is left of each head is cut, all of it begins in the last round."""
    cut = 0
    for units, heads, ctas in itertools.product(range(1, 41), (1, 2, 3, 5, 8), (1, 2, 4, 5, 132)):
        tiles = tiles_of(units, heads, ctas)
        large = sum(map(is_large, tiles))
        if large == heads * (units // UNITS):
            continue
        cut += 1
        rounds = units * heads // UNITS // ctas
        assert large <= rounds * ctas
        assert len(tiles) <= (rounds + 1) * ctas, (units, heads, ctas)
        assert large + heads > rounds * ctas  # no round more is made of small tiles than must be
    assert cut > 20


@pytest.mark.parametrize(("units", "heads", "large"), ((256, 16, 82), (64, 64, 20)))
def test_cut_tiles_of_long_calls_take_ten_rounds_and_a_small_one(
    units: int, heads: int, large: int, tiles_of: TilesOf
) -> None:
    tiles = tiles_of(units, heads, 132)
    assert sum(map(is_large, tiles)) == heads * large
    assert 10 * 132 < len(tiles) <= 11 * 132


def test_cut_tiles_too_many_for_a_last_round_stay_large(tiles_of: TilesOf) -> None:
    # 40 large ones: four rounds of nine CTAs, and a tenth of each head, which is two small ones.
    assert sum(map(is_large, tiles_of(30, 4, 9))) == 36
    # Five rounds of seven CTAs and five tiles more, of which ten small ones may begin, not twelve.
    assert sum(map(is_large, tiles_of(30, 4, 7))) == 40
