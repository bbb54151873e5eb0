// An accumulator straight to memory.
#pragma once

#include "attngen/mma/fragment.cuh"

namespace attngen {

// Rounds acc * factors to 16 bits and stores the thread's two rows of kN columns, of which there
// are `columns`; `first` is where its upper row begins, `rows` how many there are from that on.
template <class Element, int kN>
ATTNGEN_DEVICE void store_rows(char* first, long long row_bytes, int rows, int columns,
                               const float (&acc)[kN / 2], float upper, float lower, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= rows) continue;
    const float factor = half ? lower : upper;
    char* row = first + half * 8 * row_bytes + (lane & 3) * 4;
    const bool paired = reinterpret_cast<u64>(row) % 4 == 0;
    const int left = columns - (lane & 3) * 2;
#pragma unroll
    for (int k = 0; k < kN / 4; k += 2) {
      const int index = fragment_index(half, k);
      const int column = fragment_column(index);
      const u32 packed = Element::pack(acc[index] * factor, acc[index + 1] * factor);
      auto* at = reinterpret_cast<unsigned short*>(row) + column;
      if (paired && column + 1 < left) {
        *reinterpret_cast<u32*>(at) = packed;
      } else {
        if (column < left) at[0] = static_cast<unsigned short>(packed);
        if (column + 1 < left) at[1] = static_cast<unsigned short>(packed >> 16);
      }
    }
  }
}

// Threads l of a row have x[0] to x[3]; then they have the l-th of each of the four.
ATTNGEN_DEVICE void quad_transpose(u32 (&x)[4], int lane) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const u32 other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + distance], distance);
      x[i] = upper ? other : x[i];
      x[i + distance] = upper ? x[i + distance] : other;
    }
  }
}

// The same of all kN columns, where rows begin at multiples of 16 bytes: threads of a row exchange
// what they have of four times 8 columns, so that each stores 16 bytes.
template <class Element, int kN>
ATTNGEN_DEVICE void store_whole_rows(char* first, long long row_bytes, int rows,
                                     const float (&acc)[kN / 2], float upper, float lower,
                                     int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = half ? lower : upper;
    char* row = first + half * 8 * row_bytes + (lane & 3) * 16;
#pragma unroll
    for (int column = 0; column < kN; column += 32) {
      u32 x[4] = {};
#pragma unroll
      for (int i = 0; i < min_of(4, (kN - column) / 8); ++i) {
        const float* pair = acc + column / 2 + i * 4 + half * 2;
        x[i] = Element::pack(pair[0] * factor, pair[1] * factor);
      }
      quad_transpose(x, lane);
      if (half * 8 < rows && column + (lane & 3) * 8 < kN) {
        *reinterpret_cast<uint4*>(row + column * 2) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

}  // namespace attngen
