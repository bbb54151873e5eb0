// An accumulator straight to memory, where the copy engine cannot write the rows.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"

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

}  // namespace attngen
