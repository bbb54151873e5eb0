"""Schedules of varying lengths: every tile once, in order; in waves, whose tiles keep to the same
block; classes of length; own blocks."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from tests.support.wave_kit import descending, farthest_apart

SOURCE = """
#include "attngen/scheduler/sequence_order.cuh"
using namespace attngen;
template <bool kLongest, int kTailShare>
void find(const int* schedule, int heads, int n, const int* at, int* out) {
  SequenceOrder order = {schedule, heads};
  for (int i = 0; i < n; ++i) {
    const TileCoord tile = order.at<kLongest, kTailShare>(at[i]);
    out[3 * i] = tile.row_block, out[3 * i + 1] = tile.head, out[3 * i + 2] = tile.batch;
  }
}
extern "C" void tiles_at(const int* schedule, int heads, int longest, int share, int n,
                         const int* at, int* out) {
  const auto ends = longest ? find<true, 4> : find<false, 4>;
  const auto none = longest ? find<true, 0> : find<false, 0>;
  (share ? ends : none)(schedule, heads, n, at, out);
}
extern "C" void waves_at(const int* schedule, int heads, int ctas, int n, const int* at, int* out) {
  SequenceOrder order = {schedule, heads};
  for (int i = 0; i < n; ++i) {
    const WaveTile found = order.at_wave(at[i], ctas);
    out[4 * i] = found.tile.row_block, out[4 * i + 1] = found.tile.head;
    out[4 * i + 2] = found.tile.batch, out[4 * i + 3] = found.ascends;
  }
}
extern "C" int tiles(const int* schedule) { return SequenceOrder{schedule, 1}.tiles(); }
// Each of few sequences finds its place; entries of none, too.
template <int kTailShare>
void few(int* schedule, int heads, const int* lengths, const int* tiles, const int* groups) {
  for (int batch = 0; batch < kFewSequences; ++batch) {
    const OrderPlace at = place_among_few<kTailShare>(lengths, tiles, batch);
    write_few<kTailShare>(reinterpret_cast<ScheduledSequence*>(schedule), at, batch, tiles[batch],
                          heads, groups[batch]);
  }
}
extern "C" void order_few(int* schedule, int heads, int share, const int* lengths,
                          const int* tiles, const int* groups) {
  (share ? few<4> : few<0>)(schedule, heads, lengths, tiles, groups);
}
extern "C" int class_of(int length) { return length_class(length); }
"""


@pytest.fixture(scope="module")
def compiled(compile_cpp):
    return ctypes.CDLL(str(compile_cpp(SOURCE)))


def ints(numbers):
    array = np.ascontiguousarray(numbers, dtype=np.int32)
    return array, array.ctypes.data_as(ctypes.c_void_p)


def schedule_of(tiles, heads, group, share=0):
    """Make the schedule that the kernel before the others writes, of sequences in their own order.

    share: one tile of so many is kept for the end.
    """
    kept = [n // share if share else 0 for n in tiles]
    counts = [n - k for n, k in zip(tiles, kept, strict=True)] + (kept if share else [])
    ends = np.cumsum([n * heads for n in counts])
    rows = [(0, int(ends[-1]) if len(ends) else 0, 0, 0)]
    b = len(tiles)
    return rows + [
        (n % b, int(end), tiles[n % b], group if n < b else 0) for n, end in enumerate(ends)
    ]


TILES = [(1,), (3, 0, 2), (0, 0, 1, 5), (2, 1, 0, 0), (0, 4, 0, 1, 1), (9, 0, 4, 8, 3)]


@pytest.mark.parametrize("share", [0, 4])
@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_order_hands_out_every_tile_once_whoever_draws(compiled, tiles, longest, share):
    for heads, ctas in itertools.product((1, 2, 5), (1, 3, 7)):
        for group in range(1, heads + 1):
            table, schedule = ints(schedule_of(tiles, heads, group, share))
            total = compiled.tiles(schedule)
            assert total == sum(tiles) * heads
            found = []
            for cta in range(ctas):  # each asks for numbers that grow, with a place of its own
                at, numbers = ints(range(cta, total, ctas))
                out, results = ints(np.zeros((len(at), 3)))
                compiled.tiles_at(schedule, heads, longest, share, len(at), numbers, results)
                found += map(tuple, out.reshape(-1, 3).tolist())
            wanted = itertools.chain.from_iterable(
                itertools.product(range(n), range(heads), [b]) for b, n in enumerate(tiles)
            )
            assert sorted(found) == sorted(wanted)
            assert table[0, 1] == total


def test_order_takes_heads_of_a_group_in_turn_and_rows_as_asked(compiled):
    _, schedule = ints(schedule_of((2, 1), 4, 2))
    _, at = ints(range(12))
    for longest, rows in ((1, (1, 0)), (0, (0, 1))):
        out, results = ints(np.zeros((12, 3)))
        compiled.tiles_at(schedule, 4, longest, 0, 12, at, results)
        first = [(r, h, 0) for heads in ((0, 1), (2, 3)) for r in rows for h in heads]
        assert [tuple(x) for x in out.tolist()] == [*first, *((0, h, 1) for h in range(4))]


@pytest.mark.parametrize("longest", [False, True])
def test_order_keeps_the_last_tiles_of_every_head_for_the_end(compiled, longest):
    _, schedule = ints(schedule_of((8, 3, 4), 2, 1, 4))
    total = compiled.tiles(schedule)
    _, at = ints(range(total))
    out, results = ints(np.zeros((total, 3)))
    compiled.tiles_at(schedule, 2, longest, 4, total, at, results)
    rows = (1, 1, 0, 0, 0, 0) if longest else (6, 6, 7, 7, 3, 3)
    tail = [*zip(rows, (0, 1) * 3, (0, 0, 0, 0, 2, 2), strict=True)]
    assert [tuple(x) for x in out[-6:].tolist()] == tail
    assert [tuple(x) for x in out[12:15].tolist()] == [
        (row, 0, 1) for row in ((2, 1, 0) if longest else (0, 1, 2))
    ]


def waves(compiled, tiles, heads, ctas, group=1, numbers=None):
    """Tiles of these numbers, or all, as a CTA finds them: row, head, batch, whether it ascends."""
    _, schedule = ints(schedule_of(tiles, heads, group))
    at, pointer = ints(range(compiled.tiles(schedule)) if numbers is None else numbers)
    out, results = ints(np.zeros((len(at), 4)))
    compiled.waves_at(schedule, heads, ctas, len(at), pointer, results)
    return [(*tile, bool(ascends)) for *tile, ascends in out.tolist()]


@pytest.mark.parametrize("tiles", [*TILES, (0, 0), (300, 132, 40, 0, 3)], ids=str)
def test_waves_hand_out_every_tile_once_whoever_draws(compiled, tiles):
    for heads, ctas in itertools.product((1, 2, 5), (1, 3, 7, 132)):
        total = sum(tiles) * heads
        every = waves(compiled, tiles, heads, ctas)
        found = [
            waves(compiled, tiles, heads, ctas, numbers=range(cta, total, ctas))
            for cta in range(ctas)
        ]
        assert all(each == every[cta::ctas] for cta, each in enumerate(found))
        wanted = itertools.chain.from_iterable(
            itertools.product(range(n), range(heads), [b]) for b, n in enumerate(tiles)
        )
        assert sorted(tile[:3] for tile in every) == sorted(wanted)


@pytest.mark.parametrize("tiles", [*TILES, (300, 132, 40, 0, 3)], ids=str)
def test_waves_rows_of_a_head_come_from_the_first_on(compiled, tiles):
    """In an order of additions a tile waits for those of its head with smaller numbers."""
    for heads, ctas in itertools.product((1, 2, 5), (1, 3, 7, 132)):
        rows = {(h, b): [] for b, n in enumerate(tiles) for h in range(heads) if n}
        for row, head, batch, _ in waves(compiled, tiles, heads, ctas):
            rows[head, batch].append(row)
        assert all(found == [*range(tiles[b])] for (_, b), found in rows.items())


def test_waves_take_so_many_heads_of_a_sequence_as_fill_the_ctas(compiled):
    """Whatever the schedule has of heads together."""
    for group in (1, 2, 4):
        found = waves(compiled, (2, 0, 1), 4, 4, group)
        down = [(row, head, 0, False) for row in (0, 1) for head in (0, 1)]
        up = [(row, head, 0, True) for row in (0, 1) for head in (2, 3)]
        assert found == [*down, *up, *((0, head, 2, False) for head in range(4))]


def test_waves_of_a_long_head_turn_inside_it(compiled):
    found = waves(compiled, (12, 8), 2, 4)
    assert [ascends for *_, ascends in found] == [bool(n // 4 % 2) for n in range(40)]


@pytest.mark.parametrize("tiles", [(2,) * 6 + (1,) * 12, (3,) * 9, (3, 2, 2, 1, 1, 1, 1)], ids=str)
def test_waves_of_short_sequences_turn_about_once_the_ctas_are_filled(compiled, tiles):
    found = waves(compiled, tiles, 2, 12)
    runs = [(up, len([*each])) for up, each in itertools.groupby(up for *_, up in found)]
    assert [up for up, _ in runs] == [bool(n % 2) for n in range(len(runs))] and len(runs) > 1
    assert all(length <= 18 for _, length in runs) and all(length >= 6 for _, length in runs[:-1])


@pytest.mark.parametrize(
    "tiles",
    [(32,) * 8, (64,) * 4, (66,) * 4, (132,) * 4, (130,) * 4, (64, 32, 32, 16, 16),
     (128, 64, 32, 16, 8), (132, 66, 66, 33, 33, 33, 33)],
    ids=str,
)  # fmt: skip
def test_tiles_of_a_head_are_at_nearly_the_same_block_at_any_time(compiled, tiles):
    """Tiles side by side keep shared blocks in L2. If all descended, the second wave would begin at
    the end while others are at the middle."""
    found = waves(compiled, tiles, 8, 132)
    assert farthest_apart(found, tiles, 132) < 8
    assert farthest_apart(descending(found), tiles, 132) >= tiles[0] * 3 // 4


@pytest.mark.parametrize("tiles", [(264, 132, 66), (396, 264), (262,) * 3], ids=str)
def test_tiles_of_a_long_head_are_at_one_block_a_direction(compiled, tiles):
    found = waves(compiled, tiles, 4, 132)
    assert farthest_apart(found, tiles, 132, apart=True) < 2
    assert farthest_apart(descending(found), tiles, 132, apart=True) >= tiles[0] // 2


@pytest.mark.parametrize("share", [0, 4])
@pytest.mark.parametrize("count", [1, 2, 9, 32])
def test_few_sequences_are_ordered_as_many_are(compiled, count, share):
    drawn = np.random.default_rng(count)
    for _ in range(20):
        lengths, tiles, groups = (np.zeros(32, int) for _ in range(3))
        lengths[count:] = -1
        lengths[:count], tiles[:count] = drawn.integers(0, 6, count), drawn.integers(0, 12, count)
        groups[:count], heads = drawn.integers(1, 4, count), 3
        table, schedule = ints(np.full((65, 4), -1))
        arrays = [ints(x) for x in (lengths, tiles, groups)]
        compiled.order_few(schedule, heads, share, *(pointer for _, pointer in arrays))
        order = sorted(range(32), key=lambda b: -lengths[b])  # equal lengths as they come
        wanted = schedule_of([tiles[b] for b in order], heads, 0, share)
        assert table[0, 1] == wanted[0][1]
        for place, (rank, end, n, _) in enumerate(wanted[1:]):
            group = groups[order[rank]] if place < 32 else 0
            assert table[1 + place].tolist() == [order[rank], end, n, group]


def test_length_classes_grow_with_the_length_and_fit(compiled):
    lengths = [*range(5000), *(1 << n for n in range(12, 31)), (1 << 30) - 1]
    classes = [compiled.class_of(n) for n in sorted(lengths)]
    assert classes == sorted(classes) and 0 <= classes[0] and classes[-1] < 1024
    assert [compiled.class_of(n) for n in range(64)] == [*range(64)]
