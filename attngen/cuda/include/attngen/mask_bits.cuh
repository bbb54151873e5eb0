// An arbitrary mask as packed bits: bit c % 32 of word c / 32 of a row says whether column c takes
// part. A thread reads those of its two rows of an accumulator.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"

namespace attngen {

// A bit for each of four bytes: whether it is not 0, since PyTorch takes any such one for True.
ATTNGEN_HD u32 bits_of_bytes(u32 bytes) {
  const u32 ones = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
  return ones * 0x01020408u >> 24;
}

#if defined(__CUDACC__)
// The same of 16.
ATTNGEN_DEVICE u32 mask_bits_of(uint4 bytes) {
  return bits_of_bytes(bytes.x) | bits_of_bytes(bytes.y) << 4 | bits_of_bytes(bytes.z) << 8 |
         bits_of_bytes(bytes.w) << 12;
}
// Of a square of bits that has a word a lane, the word a lane of its transpose.
ATTNGEN_DEVICE u32 transpose_bits(u32 word, int lane) {
  u32 mine = 0;
#pragma unroll
  for (int bit = 0; bit < 32; ++bit) {
    const u32 column = __ballot_sync(~0u, word >> bit & 1);
    if (lane == bit) mine = column;
  }
  return mine;
}
#endif

// Bits of a fragment of kN columns. Rows of words reach at least kN columns beyond the last.
template <int kN>
struct MaskBits {
  static_assert(kN % 16 == 0, "tiles begin at half words");
  static constexpr int kWords = ceil_div(kN, 32);
  u32 words[2][kWords];  // bit 0 is that of the thread's first column

  // row: 16-byte aligned. column: that of the fragment's first, a multiple of kN.
  ATTNGEN_HD void load(int half, const u32* row, int column, int lane) {
    const u32* from = row + column / 32;
#if defined(__CUDACC__)
    if constexpr (kN % 128 == 0) {
      ATTNGEN_UNROLL
      for (int k = 0; k < kWords; k += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + k);
        words[half][k] = four.x, words[half][k + 1] = four.y;
        words[half][k + 2] = four.z, words[half][k + 3] = four.w;
      }
    } else if constexpr (kN % 64 == 0) {
      ATTNGEN_UNROLL
      for (int k = 0; k < kWords; k += 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from + k);
        words[half][k] = two.x, words[half][k + 1] = two.y;
      }
    } else
#endif
    {
      ATTNGEN_UNROLL
      for (int k = 0; k < kWords; ++k) {
        words[half][k] = from[k];
        if (kN % 32 != 0 && column % 32 != 0) words[half][k] = from[k] >> 16 | from[k + 1] << 16;
      }
    }
    ATTNGEN_UNROLL
    for (int k = 0; k < kWords; ++k) words[half][k] >>= (lane & 3) * 2;
  }
  // Of row `half`, nothing outside columns [lo, hi), less the thread's first, takes part.
  ATTNGEN_HD void limit(int half, int lo, int hi) {
    ATTNGEN_UNROLL
    for (int k = 0; k < kWords; ++k) {
      words[half][k] &= lowest_bits(hi - 32 * k) & ~lowest_bits(lo - 32 * k);
    }
  }
  // Whether element `index` of the accumulator takes part.
  ATTNGEN_HD bool sees(int index) const {
    const int column = fragment_column(index);
    return (words[fragment_row(index)][column / 32] >> (column % 32) & 1) != 0;
  }
};

}  // namespace attngen
