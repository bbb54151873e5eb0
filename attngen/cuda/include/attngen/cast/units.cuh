// Numbers of 16 bits on their way to 8, 16 bytes at a time: their largest magnitude, and how
// they are stored.
#pragma once

#include "attngen/platform.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

constexpr int kPerUnit = 8;  // numbers in 16 bytes

// The larger of two numbers in each half, which are not negative.
ATTNGEN_DEVICE u32 larger_halves(u32 a, u32 b) {
  const u32 low = max_of(a & 0xffffu, b & 0xffffu);
  const u32 high = max_of(a >> 16, b >> 16);
  return high << 16 | low;
}
// The largest magnitudes so far and those of a unit, in each half, by their bits.
ATTNGEN_DEVICE u32 with_magnitudes(u32 most, uint4 unit) {
  constexpr u32 kMagnitude = 0x7fff7fffu;
  const u32 words[] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) most = larger_halves(most, words[i] & kMagnitude);
  return most;
}
// The larger half as the bits of a float32.
template <class Element>
ATTNGEN_DEVICE u32 magnitude_bits(u32 halves) {
  return __float_as_uint(Element::unpack(max_of(halves & 0xffffu, halves >> 16)).x);
}
// The largest of the CTA's threads, for all of them. `shared`: a word for each warp.
template <int kWarps>
ATTNGEN_DEVICE u32 largest_of_cta(u32 x, u32* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max_of(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();  // the words of the call before were read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) x = max_of(x, shared[warp]);
  return x;
}
// Eight numbers in 8 bits, multiplied by a scale in float32, saturated.
template <class Element, class Stored>
ATTNGEN_DEVICE uint2 stored_unit(uint4 unit, float scale) {
  const u32 words[] = {unit.x, unit.y, unit.z, unit.w};
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = Element::unpack(words[i]);
    pairs[i] = Stored::pack(both.x * scale, both.y * scale);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

}  // namespace attngen
