// Rows that begin anywhere, or whose elements lie apart, as all threads of a CTA copy them.
#pragma once

#include "attngen/copy/gathered_rows.cuh"

namespace attngen {

// Starts to copy kRows rows from `row` on, of kColumns columns, by all kThreads threads of the CTA:
// a warp copies 16 rows at a time.
template <int kThreads, int kColumns, int kRows>
ATTNGEN_DEVICE void copy_rows(u32 tile, const GatheredRows& from, int row) {
  constexpr int kBytes = ceil_div(kColumns, 16) * 32;
  constexpr u32 kBoxBytes = kRows * 128;
  const int lane = forget(threadIdx.x % 32);
  const int unit = from.unit();
#pragma unroll 1
  for (int i = threadIdx.x / 32 * 16; i < kRows; i += kThreads / 2) {
    if (unit == 16) {
      gather_units<16, kBytes, 16>(tile + i * 128, kBoxBytes, from, row + i, lane);
    } else if (unit == 8) {
      gather_units<8, kBytes, 16>(tile + i * 128, kBoxBytes, from, row + i, lane);
    } else if (unit == 4) {
      gather_units<4, kBytes, 16>(tile + i * 128, kBoxBytes, from, row + i, lane);
    } else {
      gather_elements<kBytes, 16>(tile + i * 128, kBoxBytes, from, row + i, lane);
    }
  }
}

}  // namespace attngen
