// Instructions of a warp by CUTLASS's wrappers: products, matrices out of shared memory, and copies
// into it.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "attngen/ptx/math.cuh"

namespace attngen {

// Products of 16 x 8 x 16, by the type of their operands.
template <class Element>
struct WarpProduct;
template <>
struct WarpProduct<Bf16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};
template <>
struct WarpProduct<Fp16> : cute::SM80_16x8x16_F32F16F16F32_TN {};

// acc[16 x 8] += A B^T of the warp's fragments: 16 rows, 8 rows, of 16 columns each.
template <class Element>
ATTNGEN_DEVICE void multiply_add(float* acc, const u32 (&a)[4], u32 b0, u32 b1) {
  WarpProduct<Element>::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0],
                            acc[1], acc[2], acc[3]);
}

// 16 bytes of shared memory, as wrappers take them: their address is all that is looked at.
ATTNGEN_DEVICE cute::uint128_t& shared_piece(u32 address) {
  return *reinterpret_cast<cute::uint128_t*>(static_cast<u64>(address));
}
// Four 8x8 matrices of 16-bit elements, the rows of which the lanes have the addresses of.
ATTNGEN_DEVICE void load_matrices(u32* fragment, u32 address) {
  cute::SM75_U32x4_LDSM_N::copy(shared_piece(address), fragment[0], fragment[1], fragment[2],
                                fragment[3]);
}
// As load_matrices, each matrix transposed.
ATTNGEN_DEVICE void load_matrices_transposed(u32* fragment, u32 address) {
  cute::SM75_U16x8_LDSM_T::copy(shared_piece(address), fragment[0], fragment[1], fragment[2],
                                fragment[3]);
}
// Starts to copy 16 bytes past L1, or zeros where they are not `there`.
ATTNGEN_DEVICE void copy_piece(u32 address, const char* source, bool there) {
  using Piece = cute::uint128_t;
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Piece>::copy(*reinterpret_cast<const Piece*>(source),
                                                     shared_piece(address), there);
}

}  // namespace attngen
