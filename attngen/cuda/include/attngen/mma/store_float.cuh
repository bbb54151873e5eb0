// An accumulator straight to memory, in float32.
#pragma once

#include "attngen/mma/fragment.cuh"

namespace attngen {

// Stores two columns of a row, of which there are `left` from the first on.
ATTNGEN_DEVICE void store_float_pair(float* at, int left, float first, float second) {
  if (left > 1 && reinterpret_cast<u64>(at) % 8 == 0) {
    *reinterpret_cast<float2*>(at) = make_float2(first, second);
  } else {
    if (left > 0) at[0] = first;
    if (left > 1) at[1] = second;
  }
}

// Stores acc * factors, a thread's two rows of kN columns, of which there are `columns`; `first` is
// where its upper row begins, `rows` how many there are from that on. Four threads write 32
// contiguous bytes.
template <int kN>
ATTNGEN_DEVICE void store_float_rows(char* first, long long row_bytes, int rows, int columns,
                                     const float (&acc)[kN / 2], float upper, float lower,
                                     int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= rows) continue;
    const float factor = half ? lower : upper;
    float* row = reinterpret_cast<float*>(first + half * 8 * row_bytes) + (lane & 3) * 2;
    const int left = columns - (lane & 3) * 2;
#pragma unroll
    for (int k = 0; k < kN / 4; k += 2) {
      const int index = fragment_index(half, k);
      const int column = fragment_column(index);
      store_float_pair(row + column, left - column, acc[index] * factor, acc[index + 1] * factor);
    }
  }
}

}  // namespace attngen
