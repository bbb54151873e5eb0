// Dropout of weights that are stored as bytes, four of a row in a register: the decisions of
// attngen/dropout.cuh as masks of these registers.
#pragma once

#include "attngen/dropout.cuh"

namespace attngen {

// Which bytes of a register are kept that has a row's four weights of a tile of S of 16 columns
// (mma/transpose.cuh), all bits of each. even, odd: what is kept of the lane's even and odd
// columns, by DropWords' words.
ATTNGEN_HD u32 kept_bytes(u32 even, u32 odd, int row) {
  return permute_bytes(even, odd, row != 0 ? 0xfbd9u : 0xeac8u);
}

// The decisions of a thread for a fragment of 64 columns of S^T, in one register.
struct KeptBits {
  static constexpr int kOdd = 2;  // bits of odd columns lie so far below those of even ones
  u32 bits;

  ATTNGEN_HD explicit KeptBits(const DropBits<64>& drawn) : bits(drawn.even | drawn.odd >> kOdd) {}

  // Which bytes of a register are kept that has a row's four elements of a tile of 16 columns
  // (mma/stage8.cuh), all bits of each.
  ATTNGEN_HD u32 bytes(int tile, int row) const {
    const int left = 7 - drop_bit(tile);
    return permute_bytes(bits << left, bits << (left + kOdd), row != 0 ? 0xfbeau : 0xd9c8u);
  }
  // Whether element `index` is kept.
  ATTNGEN_HD bool keeps(int index) const {
    const int byte = drop_byte<true>((index >> 1) & 1, (index >> 2) & 1);
    const int bit = byte * 8 + drop_bit(index / 8) - (index & 1) * kOdd;
    return (bits >> bit & 1) != 0;
  }
};

#if defined(__CUDACC__)
// Zeroes the dropped ones among a block's weights, by words that the warp has drawn.
template <int kN>
ATTNGEN_DEVICE void drop_bytes(u32 (&packed)[kN / 8], const DropWords<kN>& drawn,
                               const DropThreshold& threshold, int lane) {
#pragma unroll
  for (int tile = 0; tile < DropWords<kN>::kTiles; ++tile) {
    u32 words[2];
    load_shared_x2(words, drawn.base + drawn.half(lane) + tile * drawn.kTileBytes);
    const u32 even = threshold.kept(words[0]);
    const u32 odd = threshold.kept(words[1]);
    packed[2 * tile] &= kept_bytes(even, odd, 0);
    packed[2 * tile + 1] &= kept_bytes(even, odd, 1);
  }
}

// By what normalised weights are multiplied to be stored where a call does not say: the largest
// power of two with which none exceeds `largest`, those that are kept being up to 1 / keep_share.
ATTNGEN_DEVICE float own_scale_of_kept(float largest, float keep_share) {
  return __uint_as_float(__float_as_uint(largest * keep_share) & 0x7F800000u);
}
#endif

}  // namespace attngen
