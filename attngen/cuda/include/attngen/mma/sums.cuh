// Sums of accumulators of a warpgroup's 64 rows in memory, to which CTAs add. Of a thread of 128,
// as they have rows (mma/fragment.cuh), element i lies among the same of all threads: each addition
// is of whole sectors.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

constexpr int kSumThreads = 128;

// Elements i to i + 3 of the thread.
template <int kThreads>
ATTNGEN_DEVICE float4 gather_planes(const void* sums, int i) {
  static_assert(kThreads == kSumThreads, "a thread for each place of a plane");
  const float* at = static_cast<const float*>(sums) + i * kSumThreads + threadIdx.x;
  return make_float4(at[0], at[kSumThreads], at[2 * kSumThreads], at[3 * kSumThreads]);
}
// Adds kCount elements; `at` is where the first lies.
template <int kCount>
ATTNGEN_DEVICE void add_planes(float* at, const float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) atomicAdd(at + i * kSumThreads, x[i]);
}

}  // namespace attngen
