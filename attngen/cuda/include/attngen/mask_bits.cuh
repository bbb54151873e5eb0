// An arbitrary mask as packed bits: bit c % 32 of word c / 32 of a row says whether column c takes
// part. A thread reads those of its two rows of an accumulator.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_HD int leading_zeros(u64 x) {
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(x));
#else
  return __builtin_clzll(x);
#endif
}

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

// What an arbitrary mask shows of one head of one sequence, a byte a cell of 64 queries and as many
// keys. A stride is 0 where the mask is broadcast.
struct MaskCells {
  static constexpr int kSize = 64;
  static constexpr u32 kSome = 1;  // take part
  static constexpr u32 kAll = 2;   // that there are

  const unsigned char* first;
  int stride_row;
  int stride_column;

  // Of queries [row, row_end) and keys [column, column_end), neither empty: kSome unless no cell
  // that they meet shows anything, kAll where each shows all.
  ATTNGEN_HD u32 kind(int row, int row_end, int column, int column_end) const {
    u32 some = 0;
    u32 all = kAll;
    for (int i = row / kSize; i * kSize < row_end; ++i) {
      for (int j = column / kSize; j * kSize < column_end; ++j) {
        const u32 cell = first[static_cast<u32>(i * stride_row + j * stride_column)];
        some |= cell & kSome;
        all &= cell;
      }
    }
    return some | all;
  }
  // The last column of cells up to `column` in which queries [row, row_end) see something; -1 where
  // there is none.
  ATTNGEN_HD int last_shown(int row, int row_end, int column) const {
    if (stride_column == 0) return (kind(row, row_end, 0, 1) & kSome) != 0 ? column : -1;
    for (; column >= 0; column = (column & ~7) - 1) {
      u64 eight = 0;
      for (int i = row / kSize; i * kSize < row_end; ++i) {
        eight |=
            *reinterpret_cast<const u64*>(first + static_cast<u32>(i * stride_row + (column & ~7)));
      }
      eight = (eight & 0x0101010101010101ull * kSome) << (8 * (7 - column % 8));
      if (eight != 0) return column - leading_zeros(eight) / 8;
    }
    return -1;
  }
  // The last block of kN keys before `block`, not before `begin`, in which they may; begin - 1
  // where there is none.
  template <int kN>
  ATTNGEN_HD int block_before(int row, int row_end, int block, int begin) const {
    const int cell = last_shown(row, row_end, (block * kN - 1) / kSize);
    const int last = min_of((cell * kSize + kSize - 1) / kN, block - 1);
    return cell < 0 ? begin - 1 : max_of(last, begin - 1);
  }
};

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
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      words[half][0] = four.x, words[half][1] = four.y;
      words[half][2] = four.z, words[half][3] = four.w;
    } else if constexpr (kN % 64 == 0) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[half][0] = two.x, words[half][1] = two.y;
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
