// Where the elements of a wgmma accumulator (64 rows x N columns of one warpgroup) lie.
//
// A thread holds N / 2 floats: rows `lane / 4` and 8 below it of its warp's 16, and of each 8
// columns the two from 2 * (lane % 4).
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Which of the thread's two rows element `index` belongs to.
ATTNGEN_HD constexpr int fragment_row(int index) { return (index >> 1) & 1; }
// Column of element `index`, less the thread's first column.
ATTNGEN_HD constexpr int fragment_column(int index) { return (index >> 2) * 8 + (index & 1); }
// Element `k` of row `half`, in column order.
ATTNGEN_HD constexpr int fragment_index(int half, int k) {
  return (k >> 1) * 4 + half * 2 + (k & 1);
}

// How many of a row's elements stand in columns below `column`, less the thread's first.
ATTNGEN_HD constexpr int elements_below(int column) {
  return (column >> 3) * 2 + min_of(column & 7, 2);
}
// Of row `half` of a fragment of kN columns, what is outside columns [lo, hi), less the thread's
// first, becomes -inf. By bits of a word, since one instruction moves seven of them to predicates:
// two thirds of the instructions of two comparisons an element.
template <int kN>
ATTNGEN_HD void hide_outside(float (&scores)[kN / 2], int half, int lo, int hi) {
  ATTNGEN_UNROLL
  for (int first = 0; first < kN / 4; first += 32) {
    const u32 seen =
        lowest_bits(elements_below(hi) - first) & ~lowest_bits(elements_below(lo) - first);
    ATTNGEN_UNROLL
    for (int k = first; k < min_of(first + 32, kN / 4); ++k) {
      float& score = scores[fragment_index(half, k)];
      score = (seen >> (k - first) & 1) != 0 ? score : -kInfinity;
    }
  }
}

#if defined(__CUDACC__)
// The four threads that share a row agree on the maximum, or the sum.
ATTNGEN_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
ATTNGEN_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// So do all of a warp.
ATTNGEN_DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}
ATTNGEN_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
#endif

}  // namespace attngen
