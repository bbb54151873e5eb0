// The two products of attention as chains of wgmma over 128-byte-swizzled tiles.
//
// A tile of R rows lies in shared memory as boxes of R rows by 128 bytes, one after another, or as
// groups of 8 rows, kGroupBytes each, of such boxes.
#pragma once

#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/wgmma.cuh"

namespace attngen {

// Where a chain's kSteps from kFirst on find an operand that has the reduction along its rows, 32
// bytes a step, or across them, 16 rows a step: the low words of descriptors.
template <int kSteps, u32 kBoxBytes, int kFirst = 0>
ATTNGEN_DEVICE void steps_along(u32 (&low)[kSteps], u32 operand) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = kFirst + i;
    low[i] = operand_base(operand, 16) + ((step / 4 * kBoxBytes + step % 4 * 32) >> 4);
  }
}
template <int kSteps, u32 kBoxBytes, u32 kGroupBytes = 1024>
ATTNGEN_DEVICE void steps_across(u32 (&low)[kSteps], u32 operand) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    low[step] = operand_base(operand, kBoxBytes) + (step * 2 * kGroupBytes >> 4);
  }
}

// Ends the life of elements that a product is about to overwrite: until the compiler finds that
// they are multiplied by 0 it takes them for its operands, and packs four bytes of what lives on in
// three instructions instead of two.
template <int kElements>
ATTNGEN_DEVICE void forget(float (&acc)[kElements]) {
#pragma unroll
  for (float& x : acc) x = 0.f;
}

// acc[64 x N] = A B^T, or += where kAccumulate: A (64 rows) and B (N rows) both have the reduction
// along their rows, in kSteps steps of 32 bytes. More than 16 go box by box, the last of which may
// have fewer: places of all would take registers.
template <class Mma, int kSteps, u32 kABoxBytes, u32 kBBoxBytes, bool kAccumulate = false,
          u32 kGroupBytes = 1024>
ATTNGEN_DEVICE void gemm_shared_shared(float (&acc)[Mma::kN / 2], u32 a, u32 b) {
  constexpr int kChain = kSteps > 16 ? 4 : kSteps;
  constexpr int kWhole = kSteps / kChain;
  constexpr int kRest = kSteps % kChain;
  wgmma_fence();
#pragma unroll
  for (int box = 0; box < kWhole; ++box) {
    u32 a_steps[kChain];
    u32 b_steps[kChain];
    steps_along<kChain, kABoxBytes>(a_steps, a + box * kABoxBytes);
    steps_along<kChain, kBBoxBytes>(b_steps, b + box * kBBoxBytes);
    Mma::template issue<kGroupBytes>(acc, a_steps, b_steps, kAccumulate || box != 0);
  }
  if constexpr (kRest != 0) {
    u32 a_steps[kRest];
    u32 b_steps[kRest];
    steps_along<kRest, kABoxBytes>(a_steps, a + kWhole * kABoxBytes);
    steps_along<kRest, kBBoxBytes>(b_steps, b + kWhole * kBBoxBytes);
    Mma::template issue<kGroupBytes>(acc, a_steps, b_steps, 1);
  }
  wgmma_commit();
}

// The same with A's first kHeld steps in registers, of at most 16.
template <class HeldMma, class Mma, int kHeld, int kSteps, u32 kABoxBytes, u32 kBBoxBytes>
ATTNGEN_DEVICE void gemm_partly_held(float (&acc)[Mma::kN / 2], const u32 (&held)[4 * kHeld], u32 a,
                                     u32 b) {
  static_assert(kHeld < kSteps && kSteps <= 16);
  u32 b_held[kHeld];
  u32 a_steps[kSteps - kHeld];
  u32 b_steps[kSteps - kHeld];
  steps_along<kHeld, kBBoxBytes>(b_held, b);
  steps_along<kSteps - kHeld, kABoxBytes, kHeld>(a_steps, a);
  steps_along<kSteps - kHeld, kBBoxBytes, kHeld>(b_steps, b);
  wgmma_fence();
  HeldMma::template issue<1024>(acc, held, b_held, 0);
  Mma::template issue<1024>(acc, a_steps, b_steps, 1);
  wgmma_commit();
}

// acc[64 x N] = A B: A (64 rows) has the reduction along its rows, B has N along its rows and the
// reduction across them; kSteps steps of 16. Or += where kAccumulate.
template <class Mma, int kSteps, u32 kABoxBytes, u32 kBBoxBytes, bool kAccumulate = false>
ATTNGEN_DEVICE void gemm_shared_across(float (&acc)[Mma::kN / 2], u32 a, u32 b) {
  u32 a_steps[kSteps];
  u32 b_steps[kSteps];
  steps_along<kSteps, kABoxBytes>(a_steps, a);
  steps_across<kSteps, kBBoxBytes>(b_steps, b);
  wgmma_fence();
  Mma::template issue<1024>(acc, a_steps, b_steps, kAccumulate);
  wgmma_commit();
}

// acc[64 x N] = A B^T, or += where `accumulate`: as above, with A in registers.
template <class Mma, int kSteps, u32 kBBoxBytes, u32 kGroupBytes = 1024>
ATTNGEN_DEVICE void gemm_register_shared(float (&acc)[Mma::kN / 2], const u32 (&a)[4 * kSteps],
                                         u32 b, bool accumulate = false) {
  u32 b_steps[kSteps];
  steps_along<kSteps, kBBoxBytes>(b_steps, b);
  wgmma_fence();
  Mma::template issue<kGroupBytes>(acc, a, b_steps, accumulate);
  wgmma_commit();
}

// acc[64 x N] += A B: A (64 x 16 kSteps, 16-bit) in registers as accumulator fragments, B with N
// along its rows and the reduction across them.
template <class Mma, int kSteps, u32 kBBoxBytes, u32 kGroupBytes = 1024>
ATTNGEN_DEVICE void gemm_accumulate(float (&acc)[Mma::kN / 2], const u32 (&a)[4 * kSteps], u32 b) {
  u32 b_steps[kSteps];
  steps_across<kSteps, kBBoxBytes, kGroupBytes>(b_steps, b);
  wgmma_fence();
  Mma::template issue<kGroupBytes>(acc, a, b_steps, 1);
  wgmma_commit();
}

// The warp's rows of gemm_shared_shared's product by the warp alone, for what is hardly ever done.
template <class Element, int kN, int kSteps, u32 kABoxBytes, u32 kBBoxBytes,
          u32 kBGroupBytes = 1024>
ATTNGEN_DEVICE void gemm_of_warp(float (&acc)[kN / 2], u32 a_tile, u32 b_tile, int warp, int lane) {
  const u32 row = warp * 16 + (lane & 15);
  const u32 key = (lane & 7) * 128 + (lane >> 4) * kBGroupBytes;
#pragma unroll
  for (float& x : acc) x = 0.f;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    const u32 a_slot = (step % 4 * 2 + (lane >> 4)) ^ (row & 7);
    const u32 b_slot = (step % 4 * 2 + (lane >> 3 & 1)) ^ (lane & 7);
    u32 a[4];
    load_matrix_x4(a, a_tile + step / 4 * kABoxBytes + row * 128 + a_slot * 16);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      u32 b[4];
      load_matrix_x4(b, b_tile + step / 4 * kBBoxBytes + n * 2 * kBGroupBytes + key + b_slot * 16);
      Element::multiply_add(acc + n * 8, a, b[0], b[1]);
      Element::multiply_add(acc + n * 8 + 4, a, b[2], b[3]);
    }
  }
}

// This thread's part of a 64-row operand, from 128-byte-swizzled boxes into registers, in the
// order in which wgmma takes A: kSteps steps of 32 bytes.
template <int kSteps, u32 kBoxBytes>
ATTNGEN_DEVICE void load_operand(u32 (&a)[4 * kSteps], u32 tile, int warp, int lane) {
  const u32 row = warp * 16 + (lane & 15);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const u32 slot = ((step % 4) * 2 + (lane >> 4)) ^ (row & 7);
    load_matrix_x4(a + 4 * step, tile + (step / 4) * kBoxBytes + row * 128 + slot * 16);
  }
}

}  // namespace attngen
