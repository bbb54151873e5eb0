// An accumulator of which a thread has four neighbouring columns of each 16, straight to memory: of
// each row element 0 of the first four registers, of the second four, then element 1 of both.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

// Four neighbouring elements of 32, 16 or 8 bits, in one store.
template <class Element>
struct Quad {
  static constexpr int kBytes = 8;
  ATTNGEN_DEVICE static void store(char* at, float a, float b, float c, float d) {
    *reinterpret_cast<uint2*>(at) = uint2{Element::pack(a, b), Element::pack(c, d)};
  }
};
template <class Element>
struct QuadOfBytes {
  static constexpr int kBytes = 4;
  ATTNGEN_DEVICE static void store(char* at, float a, float b, float c, float d) {
    *reinterpret_cast<u32*>(at) = Element::pack(a, b) | Element::pack(c, d) << 16;
  }
};
template <>
struct Quad<float> {
  static constexpr int kBytes = 16;
  ATTNGEN_DEVICE static void store(char* at, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(at) = make_float4(a, b, c, d);
  }
};
template <>
struct Quad<E4m3> : QuadOfBytes<E4m3> {};
template <>
struct Quad<E5m2> : QuadOfBytes<E5m2> {};

// Rounds acc * factors and stores the thread's two rows of kN columns; `first` is where its upper
// row begins, `rows` how many there are from that on.
template <class Element, int kN>
ATTNGEN_DEVICE void store_quads(char* first, long long row_bytes, int rows,
                                const float (&acc)[kN / 2], float upper, float lower, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * 8 >= rows) continue;
    const float factor = half ? lower : upper;
    char* row = first + half * 8 * row_bytes + (lane & 3) * Quad<Element>::kBytes;
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      const float* x = acc + n * 8 + half * 2;
      Quad<Element>::store(row + n * 4 * Quad<Element>::kBytes, x[0] * factor, x[4] * factor,
                           x[1] * factor, x[5] * factor);
    }
  }
}

}  // namespace attngen
