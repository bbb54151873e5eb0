"""CTAs that wait for those behind them, by the kernels' own code: a clock for each, and blocks that
take as long as its SM needs, of which three are on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.io import files

MOST = 1200
STUBS = """
#include "attngen/platform.cuh"
#include <queue>
#include <vector>
#define ATTNGEN_DEVICE inline
namespace attngen {
u32 room[4];
long long waited;
float reciprocal_approx(float x) { return 1.f / x; }
u32 atomicAdd(u32* counter, u32 more) { return (*counter += more) - more; }
template <int kBytes>
void copy_async(u32, const u32* counter, bool) { room[0] = *counter; }
void await_copies() {}
void load_shared_x2(u32* x, u32 address) { x[0] = room[address]; }
void wait_cycles(int cycles) { waited += cycles; }
"""
HARNESS = """
// Each CTA's own room: what it saw stays until it looks.
using Paced = Pace<98400>;
struct Cta { Paced pace; u32 room; int left; bool waits; };
// When each CTA ends, and how long it waited; the counter as launches leave it.
extern "C" u32 launch(u32 counter, int ctas, const int* blocks, const int* cycles, int soon,
                      long long* ends, long long* waits, int* most) {
  std::vector<Cta> all;
  std::priority_queue<std::pair<long long, int>> next;  // of negative times
  for (int i = 0; i < ctas; ++i) {
    const Paced pace(&counter, 0, blocks[i], soon, i, ctas, i / 8);
    all.push_back({pace, 0, blocks[i], soon && blocks[i] >= Paced::kLeast});
    next.push({0, i});
  }
  while (!next.empty()) {
    const auto [time, i] = next.top();
    next.pop();
    Cta& cta = all[i];
    ends[i] = -time;
    if (cta.left-- == 0) {
      if (soon) cta.pace.end();
      continue;
    }
    room[0] = cta.room, waited = 0;
    if (cta.waits) cta.pace.wait(), cta.pace.count();
    cta.room = room[0];
    waits[i] += waited, *most = max_of(*most, int(waited));
    next.push({time - cycles[i] - waited / 3, i});
  }
  return counter;
}
}  // namespace attngen
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    header = (files.include_dir() / "attngen/scheduler/pace.cuh").read_text()
    header = header.partition("namespace attngen {")[2].rpartition("}  // namespace")[0]
    found = ctypes.CDLL(str(compile_cpp(STUBS + header + HARNESS)))
    found.launch.restype = ctypes.c_uint
    return found


def launch(library: ctypes.CDLL, blocks, cycles, soon: int = 32):
    """Ends, waits, the longest wait at a block, the counter. soon: 0 where nobody counts."""
    blocks, cycles = (np.ascontiguousarray(x, np.int32) for x in (blocks, cycles))
    ends, waits = np.zeros(len(blocks), np.int64), np.zeros(len(blocks), np.int64)
    most = ctypes.c_int()
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (blocks, cycles, ends, waits)]
    left = library.launch(0, len(blocks), *pointers[:2], soon, *pointers[2:], ctypes.byref(most))
    return ends, waits, most.value, left


def speeds(ctas: int = 128, share: float = 0.05) -> np.ndarray:
    """Cycles a block, by the SM."""
    return 1600 * (1 + share * np.random.default_rng(3).uniform(-1, 1, ctas))


@pytest.mark.parametrize("blocks", [64, 128, 512, 3000])
@pytest.mark.parametrize("ctas", [128, 132, 1])
@pytest.mark.parametrize("soon", [8, 32])
def test_pace_ctas_of_as_many_blocks_end_together(library, blocks, ctas, soon):
    every, cycles = [blocks] * ctas, speeds(ctas)
    alone, waits, _, untouched = launch(library, every, cycles, soon=0)
    assert not waits.any() and untouched == 0
    ends, _, most, _ = launch(library, every, cycles, soon)
    assert ends.std() <= alone.std() / (2 if blocks < 128 or soon < 32 else 3)
    assert most <= MOST
    assert ends.max() <= 1.01 * alone.max()  # who is behind waits for nobody


def test_pace_ctas_of_unequal_blocks_wait_for_the_longest(library):
    blocks = np.random.default_rng(5).integers(112, 145, 128)
    alone, *_ = launch(library, blocks, speeds(), soon=0)
    ends, _, most, _ = launch(library, blocks, speeds())
    assert ends.std() < alone.std() / 1.7 and most <= MOST
    assert ends.max() <= 1.01 * alone.max()


@pytest.mark.parametrize("longest", [200, 5000])
def test_pace_of_one_long_cta_is_its_own(library, longest):
    """However few blocks the others have, also none."""
    blocks = [longest, *([0, 1, 7, 8, 30, 100] * 20)]
    cycles = speeds(len(blocks))
    ends, waits, most, _ = launch(library, blocks, cycles)
    assert waits[0] == 0 and ends[0] == longest * int(cycles[0]) and most <= MOST


def test_pace_counts_end_where_they_began_whatever_the_blocks(library):
    for blocks in ([*range(132)], [0] * 128, [5000, 70000, 1, 12], [24], [25, 26, 27, 28, 29]):
        assert launch(library, blocks, speeds(len(blocks)))[3] == 0
