// An arbitrary mask as packed bits: bit c % 32 of word c / 32 of a row says whether column c takes
// part. A thread reads those of its two rows of an accumulator.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"

namespace attngen {

// Bits of a fragment of kN columns. Rows of words reach at least kN columns beyond the last.
template <int kN>
struct MaskBits {
  static_assert(kN % 16 == 0, "tiles begin at half words");
  static constexpr int kWords = ceil_div(kN, 32);
  u32 words[2][kWords];  // bit 0 is that of the thread's first column

  // column: that of the fragment's first, a multiple of kN.
  ATTNGEN_HD void load(int half, const u32* row, int column, int lane) {
    const u32* from = row + column / 32;
    ATTNGEN_UNROLL
    for (int k = 0; k < kWords; ++k) {
      u32 word = from[k];
      if (kN % 32 != 0 && column % 32 != 0) word = word >> 16 | from[k + 1] << 16;
      words[half][k] = word >> (lane & 3) * 2;
    }
  }
  // Whether element `index` of the accumulator takes part.
  ATTNGEN_HD bool sees(int index) const {
    const int column = fragment_column(index);
    return (words[fragment_row(index)][column / 32] >> (column % 32) & 1) != 0;
  }
};

}  // namespace attngen
