// Scales of dS, by what no number of it exceeds: of V in 8 bits, too.
#pragma once

#include "attngen/cast/units.cuh"
#include "attngen/platform.cuh"

namespace attngen {

// The largest magnitudes so far and those of a unit of 16 numbers in 8 bits, in each half.
ATTNGEN_DEVICE u32 with_byte_magnitudes(u32 most, uint4 unit) {
  constexpr u32 kMagnitude = 0x007f007fu;
  const u32 words[] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    most = larger_halves(most, words[i] & kMagnitude);
    most = larger_halves(most, words[i] >> 8 & kMagnitude);
  }
  return most;
}
// The largest power of two that is not above a number, within 2^±126; 1 of what is not positive and
// finite.
ATTNGEN_DEVICE float power_of_two_below(float x) {
  if (!(x > 0.f) || __float_as_uint(x) >= 0x7f800000u) return 1.f;
  const u32 least = 1u << 23, most = 253u << 23;
  const u32 power = __float_as_uint(x) & 0x7f800000u;
  return __uint_as_float(power < least ? least : power > most ? most : power);
}
// What a number in 8 bits stands for, which is not negative. `mantissa`: its bits of mantissa, 3 of
// e4m3 and 2 of e5m2.
ATTNGEN_DEVICE float value_of_byte(u32 bits, int mantissa) {
  if (bits >= (mantissa == 3 ? 0x7fu : 0x7du)) return __uint_as_float(0x7fffffffu);
  if (bits == 0x7cu && mantissa == 2) return __uint_as_float(0x7f800000u);
  const u32 exponent = bits >> mantissa, rest = bits & ((1u << mantissa) - 1);
  const u32 bias = mantissa == 3 ? 7 : 15;
  const float unit = __uint_as_float((127 - bias - mantissa + max_of(exponent, 1u)) << 23);
  return (exponent ? rest + (1u << mantissa) : rest) * unit;
}

}  // namespace attngen
