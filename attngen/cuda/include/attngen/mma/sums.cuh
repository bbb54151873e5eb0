// Sums of accumulators of a warpgroup's 64 rows in memory, to which CTAs add. Of a thread of 128,
// as they have rows (mma/fragment.cuh), element i lies in a plane of the same of all threads, so
// that each addition is of whole sectors; or, where four may be added at once, with its neighbours.
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

#if defined(__CUDACC__)
// Adds kCount elements where four of a thread lie together.
template <int kCount>
ATTNGEN_DEVICE void add_quads(float* at, const float* x) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at + i * kSumThreads),
                 "f"(x[i]), "f"(x[i + 1]), "f"(x[i + 2]), "f"(x[i + 3])
                 : "memory");
  }
}
#endif

}  // namespace attngen
