// The two products of attention as chains of wgmma over 128-byte-swizzled tiles.
//
// A tile of R rows lies in shared memory as boxes of R rows by 128 bytes, one after another.
#pragma once

#include "attngen/ptx/wgmma.cuh"

namespace attngen {

// acc[64 x N] = A B^T: A (64 rows) and B (N rows) both have the reduction along their rows, in
// kSteps steps of 32 bytes.
template <class Mma, int kSteps>
ATTNGEN_DEVICE void gemm_shared_shared(float (&acc)[Mma::kN / 2], u32 a, u32 a_box_bytes, u32 b,
                                       u32 b_box_bytes) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u32 box = step / 4;
    const u32 within = (step % 4) * 32;
    Mma::issue(acc, swizzled_descriptor(a + box * a_box_bytes + within, 16),
               swizzled_descriptor(b + box * b_box_bytes + within, 16), step != 0);
  }
  wgmma_commit();
}

// acc[64 x N] += A B: A (64 x 16 kSteps, 16-bit) in registers as accumulator fragments, B with N
// along its rows and the reduction across them.
template <class Mma, int kSteps>
ATTNGEN_DEVICE void gemm_register_shared(float (&acc)[Mma::kN / 2], const u32 (&a)[4 * kSteps],
                                         u32 b, u32 b_box_bytes) {
  constexpr u32 kStepBytes = 16 * 128;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Mma::issue(acc, a + 4 * step, swizzled_descriptor(b + step * kStepBytes, b_box_bytes));
  }
  wgmma_commit();
}

}  // namespace attngen
