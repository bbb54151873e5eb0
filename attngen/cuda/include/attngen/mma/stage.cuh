// An accumulator on its way to memory: 64 rows into swizzled boxes, from where the copy engine
// stores them.
#pragma once

#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// Rounds acc * factor to 16 bits and lays the warpgroup's 64 rows of kN columns down at `tile`,
// which holds boxes of 64 columns, kBoxBytes apart.
template <class Element, int kN, u32 kBoxBytes>
ATTNGEN_DEVICE void stage_rows(u32 tile, const float (&acc)[kN / 2], float factor, int warp,
                               int lane) {
  const int row = warp * 16 + (lane & 15);
#pragma unroll
  for (int chunk = 0; chunk < kN / 8; chunk += 2) {
    const u32 slot = ((chunk & 7) + (lane >> 4)) ^ (row & 7);
    const u32 address = tile + chunk / 8 * kBoxBytes + row * 128 + slot * 16;
    const float* x = acc + chunk * 4;
    const u32 a = Element::pack(x[0] * factor, x[1] * factor);
    const u32 b = Element::pack(x[2] * factor, x[3] * factor);
    if (chunk + 1 < kN / 8) {
      store_matrix_x4(address, a, b, Element::pack(x[4] * factor, x[5] * factor),
                      Element::pack(x[6] * factor, x[7] * factor));
    } else {
      store_matrix_x2(address, a, b);
    }
  }
}

// Lays 16 columns of a 64-row accumulator down transposed: `packed`, their 16-bit pairs as wgmma
// takes A, become rows 16 * step and on of a swizzled box of 64 columns.
ATTNGEN_DEVICE void stage_transposed(u32 box, int step, const u32* packed, int warp, int lane) {
  const u32 chunk = warp * 2 + ((lane >> 3) & 1);
  const u32 row = (lane >> 4) * 8 + (lane & 7);
  store_matrix_transposed_x4(box + (step * 16 + row) * 128 + ((chunk ^ (row & 7)) * 16), packed);
}

}  // namespace attngen
