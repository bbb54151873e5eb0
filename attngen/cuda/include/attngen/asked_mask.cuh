// Pairs of a mask whose program kernels of attention ask themselves, in blocks that it shows in
// part, instead of bits that a kernel before them has left.
#pragma once

#include "attngen/context.cuh"
#include "attngen/mask_bits.cuh"
#include "attngen/special.cuh"

namespace attngen {

// A query and a key.
struct MaskPair {
  int i;
  int j;
};

// The bits of a fragment all of whose pairs take part.
template <int kN>
ATTNGEN_HD MaskBits<kN> whole_mask() {
  MaskBits<kN> found;
  ATTNGEN_UNROLL
  for (int half = 0; half < 2; ++half) {
    ATTNGEN_UNROLL
    for (int word = 0; word < MaskBits<kN>::kWords; ++word) found.words[half][word] = ~0u;
  }
  return found;
}

// The bits of a thread's two rows, `row` and 8 below it, in a fragment of kN columns from `column`
// on, of `rows` that there are. sees(row, column): whether the pair takes part.
template <int kN, class Sees>
ATTNGEN_HD MaskBits<kN> ask_mask(int row, int rows, int column, int lane, Sees sees) {
  constexpr int kSide = min_of(kN, 32);  // columns of a word
  const int first = column + (lane & 3) * 2;
  MaskBits<kN> found;
  ATTNGEN_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int own = min_of(row + half * 8, rows - 1);
    ATTNGEN_UNROLL
    for (int word = 0; word < MaskBits<kN>::kWords; ++word) {
      u32 bits = 0;
      // A loop, since code of all elements would be as long as the rest of a kernel.
#if defined(__CUDACC__)
#pragma unroll 1
#endif
      for (int at = 0; at < kSide; at += 8) {
        const int from = first + word * 32 + at;
        bits |= static_cast<u32>(sees(own, from)) << at;
        bits |= static_cast<u32>(sees(own, from + 1)) << (at + 1);
      }
      found.words[half][word] = bits;
    }
  }
  return found;
}

}  // namespace attngen
