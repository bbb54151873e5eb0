"""Keys over CTAs, positions over pages: by the kernels' own code."""

from __future__ import annotations

import ctypes
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen import AttentionSpec
from attngen.call.decode import page_numbers
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.kernels.plan import plans
from attngen.kernels.support.cost import (
    SPLIT_BLOCKS,
    SPLIT_BUSY,
    UNEVEN,
    UNSPLIT_BUSY,
    Places,
    choose_splits,
    share_busy,
)
from attngen.kernels.wgmma.decode.plan import DecodePlan
from attngen.runtime.run_time import MAX_SPLITS
from attngen.spec import resolve
from attngen.spec.problem import Problem
from tests.support.paths import ROOT

RESULTS = ROOT / "docs/results/experiments.json"
LONGEST = 1 << 30
HARNESS = """
}  // namespace attngen
using namespace attngen;
extern "C" void ranges(int lo, int hi, int count, int* out) {
  for (int i = 0; i < count; ++i) {
    const Range found = split_range({lo, hi}, i, count);
    out[2 * i] = found.lo, out[2 * i + 1] = found.hi;
  }
}
extern "C" void pages(const int* table, int stride, const int* sizes, int batch, int n, int* out) {
  const PageFetch fetch = {table, stride, sizes[0], sizes[1], sizes[2]};
  for (int i = 0; i < n; ++i) {
    out[2 * i] = fetch.pages(batch)[fetch.place(i)];
    out[2 * i + 1] = i - fetch.place(i) * fetch.page_size;
  }
  out[2 * n] = fetch.stretch<64>();
}
extern "C" int place(const int* sizes, int position) {
  return PageFetch{nullptr, 0, sizes[0], sizes[1], sizes[2]}.place(position);
}
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    fragment = emit_fragment(files.templates_dir(), features.scan()["fetch"]["page_tma"])
    head = '#include "attngen/scheduler/splits.cuh"\nnamespace attngen {\n'
    return ctypes.CDLL(str(compile_cpp(head + fragment + HARNESS)))


def pairs(function, count: int, *arguments) -> np.ndarray:
    out = np.full((count + 1, 2), -1, np.int32)
    function(*arguments, count, out.ctypes.data_as(ctypes.c_void_p))
    return out[:count]


def test_split_ranges_take_every_block_once_in_order(library):
    for lo in (0, 3):
        for hi in range(lo, 40):
            for count in range(1, 45):
                found = pairs(library.ranges, count, lo, hi)
                taken = [block for a, b in found for block in range(a, b)]
                assert taken == [*range(lo, hi)]
                longest = max(b - a for a, b in found)
                assert longest == -(-(hi - lo) // count)  # nobody waits for a longer one


def test_split_ranges_of_nothing_are_empty(library):
    for count in (1, 5, MAX_SPLITS):
        found = pairs(library.ranges, count, 7, 2)
        assert (found[:, 0] >= found[:, 1]).all()


@settings(deadline=None)
@given(st.integers(0, LONGEST), st.integers(0, LONGEST), st.integers(1, MAX_SPLITS))
def test_split_ranges_of_long_sequences_meet_end_to_end(library, a, b, count):
    lo, hi = min(a, b), max(a, b)
    found = pairs(library.ranges, count, lo, hi)
    assert found[0, 0] == lo and found[-1, 1] == hi
    assert (found[1:, 0] == found[:-1, 1]).all() and (found[:, 0] <= found[:, 1]).all()


@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 16, 48, 64, 100, 256])
def test_pages_are_found_at_every_position(library, size):
    table = np.random.default_rng(0).permutation(40).astype(np.int32).reshape(4, 10)[:, :7]
    table = np.ascontiguousarray(np.pad(table, ((0, 0), (0, 3)), constant_values=-1))
    count, numbers = min(7 * size, 500), (ctypes.c_int * 3)(*page_numbers(size))
    at = table.ctypes.data_as(ctypes.c_void_p)
    for batch in range(4):
        out = np.zeros(2 * count + 1, np.int32)
        library.pages(at, 10, numbers, batch, count, out.ctypes.data_as(ctypes.c_void_p))
        position = np.arange(count)
        assert (out[:-1:2] == table[batch, position // size]).all()
        assert (out[1::2] == position % size).all()
        stretch = int(out[-1])
        assert stretch == math.gcd(size, 64)
        first = np.arange(0, count - stretch + 1, stretch)
        assert (position[first] // size == position[first + stretch - 1] // size).all()


@settings(deadline=None)
@given(st.integers(1, LONGEST - 1), st.integers(0, LONGEST - 1))
def test_places_of_positions_are_quotients(library, size, position):
    numbers = (ctypes.c_int * 3)(*page_numbers(size))
    for each in (position, position // size * size, max(position // size * size - 1, 0)):
        assert library.place(numbers, each) == each // size


TILES, BLOCKS, SLOTS = st.integers(1, 3000), st.integers(0, 5000), st.integers(1, 600)
SMS, CTAS = 132, 2


def decode_problem(head_dim: int) -> Problem:
    (problem,) = resolve.resolve(AttentionSpec(head_dim, decode=True), features.scan())
    return problem


def places_of(plan: DecodePlan) -> Places:
    return Places(SMS * plan.ctas, SMS, SMS * plan.busy_ctas, True)


@given(TILES, BLOCKS, SLOTS, st.floats(0.1, 1))
def test_choose_splits_where_arithmetic_binds_is_one_or_the_fewest_that_keep_the_chip_busy(
    tiles, blocks, slots, part
):
    places = Places(slots, slots // 2, part * slots, False)
    chosen = choose_splits(tiles, blocks, 8, places)
    limit = max(1, min(blocks // SPLIT_BLOCKS, MAX_SPLITS))
    assert 1 <= chosen <= limit
    busy = [share_busy(tiles * n, places) for n in range(1, limit + 1)]
    if busy[0] >= UNSPLIT_BUSY * max(busy):
        assert chosen == 1
    else:
        assert busy[chosen - 1] >= SPLIT_BUSY * max(busy)
        assert all(share < SPLIT_BUSY * max(busy) for share in busy[: chosen - 1])


@given(TILES, BLOCKS, SLOTS, st.floats(0.1, 0.99), st.integers(1, 64))
def test_choose_splits_where_memory_binds_joins_no_parts_for_nothing(
    tiles, blocks, slots, part, rows
):
    """No fewer parts keep the chip as busy, and no chip is left as it would be in one part."""
    places = Places(slots, slots // 2, part * slots, True)
    chosen = choose_splits(tiles, blocks, rows, places)
    assert 1 <= chosen <= max(1, min(blocks // SPLIT_BLOCKS, MAX_SPLITS))
    busy = [share_busy(tiles * n, places) for n in range(1, chosen + 1)]
    assert all(share < busy[-1] for share in busy[:-1])


@given(TILES, SLOTS, st.floats(0.1, 1), st.floats(0.1, 1), st.booleans())
def test_share_busy_is_full_waves_and_a_last_one_that_may_not_be_enough(
    ctas, slots, part, sms, memory
):
    places = Places(slots, round(sms * slots), part * slots, memory)
    waves, last = divmod(ctas, slots)
    share = share_busy(ctas, places)
    time = ctas / share
    uneven = UNEVEN * memory * (slots - last)
    most = waves * slots + max(last + uneven, places.enough) * (last > 0)
    assert waves * slots + last <= time * (1 + 1e-9) and time <= most * (1 + 1e-9)
    if waves or not memory or ctas <= places.multiprocessors:
        exact = most if waves else max(ctas, places.enough)
        assert share == pytest.approx(1.0 if not last else ctas / exact)


@pytest.mark.parametrize(
    ("tiles", "blocks", "busy_ctas", "wanted"),
    [
        (128, 128, 0.76, 1),  # 16 sequences of 8 heads: a tile an SM
        (96, 128, 0.76, 1),  # three quarters of the SMs take what there is
        (48, 128, 0.76, 3),  # 96 parts would do as well, and have to be joined, too
        (512, 128, 0.76, 1),  # many sequences: nothing to gain
        (192, 128, 0.76, 4),  # SMs with one CTA and with two
        (192, 32, 0.76, 1),  # short: joining takes longer
        (320, 128, 0.76, 4),  # few CTAs behind those that fill the chip
        (384, 128, 0.76, 2),
        (384, 32, 0.76, 1),
        (8, 1024, 0.76, 13),  # one long sequence of 8 heads
        (8, 3, 0.76, 1),  # too short to share
        (128, 128, 2.0, 2),  # arithmetic binds: two CTAs an SM
        (8, 1024, 2.0, 32),
    ],
)
def test_choose_splits_known_cases(tiles, blocks, busy_ctas, wanted):
    places = Places(SMS * CTAS, SMS, SMS * busy_ctas, busy_ctas < CTAS)
    assert choose_splits(tiles, blocks, 8, places) == wanted


def measured() -> list[dict]:
    found = json.loads(RESULTS.read_text())["decode_parts"]
    return [*found["first"], *found["second"]]


def test_choose_splits_is_at_most_a_few_percent_behind_the_fastest_measured():
    """`gbps`: by the number of parts, from one."""
    behind = []
    for row in measured():
        heads_q, heads_kv = row["heads"]
        reader, _ = plans(decode_problem(row["head_dim"]), "sm_90a")
        tiles, blocks = row["b"] * heads_kv, row["length"] // reader.tile.n
        chosen = choose_splits(tiles, blocks, heads_q / heads_kv, places_of(reader))
        behind.append(1 - row["gbps"][chosen - 1] / max(row["gbps"]))
    assert len(behind) == 45 and max(behind) < 0.025 and statistics.mean(behind) < 0.0035
