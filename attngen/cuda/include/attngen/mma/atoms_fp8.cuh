// Products of a warp of 8-bit operands by CUTLASS's wrappers.
#pragma once

#include <cute/arch/mma_sm89.hpp>

#include "attngen/ptx/math.cuh"

namespace attngen {

// Products of 16 x 8 x 32, by the types of their operands.
template <class A, class B>
struct WarpProductOf;
template <>
struct WarpProductOf<E4m3, E4m3> : cute::SM89_16x8x32_F32E4M3E4M3F32_TN {};
template <>
struct WarpProductOf<E4m3, E5m2> : cute::SM89_16x8x32_F32E4M3E5M2F32_TN {};
template <>
struct WarpProductOf<E5m2, E4m3> : cute::SM89_16x8x32_F32E5M2E4M3F32_TN {};
template <>
struct WarpProductOf<E5m2, E5m2> : cute::SM89_16x8x32_F32E5M2E5M2F32_TN {};

// acc[16 x 8] += A B^T of the warp's fragments: 16 rows, 8 rows, of 32 columns each.
template <class A, class B>
ATTNGEN_DEVICE void multiply_add(float* acc, const u32 (&a)[4], u32 b0, u32 b1) {
  WarpProductOf<A, B>::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0],
                           acc[1], acc[2], acc[3]);
}

}  // namespace attngen
