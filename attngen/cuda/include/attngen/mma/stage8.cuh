// Accumulators in 8 bits: fragments that wgmma takes for A, and their transposition on the way to
// shared memory.
//
// Within each 16 columns of an accumulator a thread's four bytes of A stand for its two of the
// first eight and its two of the others (mma/transpose.cuh), so that nothing is exchanged between
// threads.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

ATTNGEN_DEVICE float load_shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Four floats as bytes, `a` first.
template <class Element>
ATTNGEN_DEVICE u32 pack_bytes(float a, float b, float c, float d) {
  return Element::pack(a, b, c, d);
}
template <>
ATTNGEN_DEVICE u32 pack_bytes<E5m2>(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n.reg .b16 x, y;\ncvt.rn.satfinite.e5m2x2.f32 x, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 y, %4, %3;\nmov.b32 %0, {x, y};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// 16 columns of an accumulator, two registers of A: the thread's upper row, and its lower.
template <class Element>
ATTNGEN_DEVICE void pack_rows(u32* packed, const float* x) {
  packed[0] = pack_bytes<Element>(x[0], x[1], x[4], x[5]);
  packed[1] = pack_bytes<Element>(x[2], x[3], x[6], x[7]);
}
// kColumns of them, in steps of 32.
template <class Element, int kColumns>
ATTNGEN_DEVICE void pack_rows(u32 (&packed)[kColumns / 8], const float (&x)[kColumns / 2]) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) pack_rows<Element>(packed + 2 * i, x + 8 * i);
}

// Lays 32 columns of a 64-row accumulator down transposed: `packed`, four registers of A, become
// rows 32 * step and on of a tile whose rows have 128 bytes, the warp's 16 in `chunk`. There row i
// of a warp's upper eight and row i of its lower eight are neighbours (OfPairs in
// mma/transpose.cuh).
ATTNGEN_DEVICE void stage_transposed_bytes(u32 tile, int step, u32 chunk, const u32* packed,
                                           int lane) {
  u32 pairs[4];
  pairs[0] = permute_bytes(packed[0], packed[1], 0x5140);
  pairs[1] = permute_bytes(packed[0], packed[1], 0x7362);
  pairs[2] = permute_bytes(packed[2], packed[3], 0x5140);
  pairs[3] = permute_bytes(packed[2], packed[3], 0x7362);
  store_matrix_transposed_x4(tile + (step * 32 + lane) * 128 + ((chunk ^ (lane & 7)) * 16), pairs);
}

// Rounds acc * factor to 8 bits and lays the warpgroup's 64 rows of kN columns down at `tile`, a
// box of 128 columns.
template <class Element, int kN>
ATTNGEN_DEVICE void stage_byte_rows(u32 tile, const float (&acc)[kN / 2], float factor, int warp,
                                    int lane) {
  const int row = warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kN / 2; i += 2) {
    const int place = row + fragment_row(i) * 8;
    const int column = fragment_column(i) + (lane & 3) * 2;
    const u32 address = tile + place * 128 + (((column / 16) ^ (place & 7)) * 16) + column % 16;
    store_shared_16(address, Element::pack(acc[i] * factor, acc[i + 1] * factor));
  }
}

}  // namespace attngen
