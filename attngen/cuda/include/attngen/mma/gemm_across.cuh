// A product that adds to what is there, of two operands in shared memory.
#pragma once

#include "attngen/mma/gemm.cuh"

namespace attngen {

// acc[64 x N] += A B: A (64 rows) has the reduction along its rows, B has N along its rows and the
// reduction across them; kSteps steps of 16.
template <class Mma, int kSteps, u32 kABoxBytes, u32 kBBoxBytes, u32 kGroupBytes>
ATTNGEN_DEVICE void gemm_accumulate_across(float (&acc)[Mma::kN / 2], u32 a, u32 b) {
  u32 a_steps[kSteps];
  u32 b_steps[kSteps];
  steps_along<kSteps, kABoxBytes>(a_steps, a);
  steps_across<kSteps, kBBoxBytes, kGroupBytes>(b_steps, b);
  wgmma_fence();
  Mma::template issue<kGroupBytes>(acc, a_steps, b_steps, 1);
  wgmma_commit();
}

}  // namespace attngen
