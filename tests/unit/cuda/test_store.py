"""An output's way from registers to memory, by the kernels' own code on 32 threads of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

COLUMNS = (8, 40, 56, 104, 128)
# Threads of a warp meet at each exchange, twice: when all have written, and when all have read.
HARNESS = """
#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>
#define __CUDACC__
#define __device__
#define __forceinline__ inline
using std::max, std::min;
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
thread_local int this_lane;
unsigned values[32];
std::atomic<int> arrived{0};
void meet() {
  const int round = arrived.fetch_add(1) / 32;
  while (arrived.load() < (round + 1) * 32) std::this_thread::yield();
}
template <class T> T __shfl_xor_sync(unsigned, T x, int distance) {
  static_assert(sizeof(T) == 4);
  values[this_lane] = reinterpret_cast<unsigned&>(x);
  meet();
  const unsigned other = values[this_lane ^ distance];
  meet();
  return reinterpret_cast<const T&>(other);
}
template <class T> T __shfl_sync(unsigned, T x, int) { return x; }
#include "attngen/mma/store.cuh"
struct Rounded {  // to whole numbers, of which a test has no larger ones than 16 bits hold
  static unsigned pack(float low, float high) {
    return static_cast<unsigned>(low) | static_cast<unsigned>(high) << 16;
  }
};
// 16 rows of a warp, numbered along rows; of which there are `rows`.
template <int kN> void store(unsigned short* out, int row_elements, int rows) {
  using namespace attngen;
  std::vector<std::thread> threads;
  for (int lane = 0; lane < 32; ++lane) {
    threads.emplace_back([=] {
      this_lane = lane;
      const int row = lane / 4;
      float acc[kN / 2];
      for (int i = 0; i < kN / 2; ++i) {
        acc[i] = (row + fragment_row(i) * 8) * kN + fragment_column(i) + (lane & 3) * 2;
      }
      store_whole_rows<Rounded, kN>(reinterpret_cast<char*>(out + row * row_elements),
                                    row_elements * 2, rows - row, acc, 1.f, 2.f, lane);
    });
  }
  for (auto& each : threads) each.join();
}
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    calls = "".join(
        f'extern "C" void store_{n}(unsigned short* out, int row_elements, int rows) '
        f"{{ store<{n}>(out, row_elements, rows); }}\n"
        for n in COLUMNS
    )
    return ctypes.CDLL(str(compile_cpp(HARNESS + calls, "-Wno-unknown-pragmas", "-pthread")))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("rows", [0, 3, 8, 11, 16])
@pytest.mark.parametrize("columns", COLUMNS)
def test_whole_rows_are_stored_where_they_belong_and_no_others(library, columns, rows):
    wide = columns + 8
    out = np.full((16, wide), 0xFFFF, np.uint16)
    getattr(library, f"store_{columns}")(out.ctypes.data_as(ctypes.c_void_p), wide, rows)
    expected = np.full_like(out, 0xFFFF)
    numbers = np.arange(16 * columns).reshape(16, columns)
    numbers[8:] *= 2  # the factor of the lower rows
    expected[:rows, :columns] = numbers[:rows]
    assert (out == expected).all()
