// Scales of tensors that are stored in 8 bits, by their largest magnitudes.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

constexpr u32 kInfinityBits = 0x7f800000u;

// How a scale follows from a magnitude: the largest number of the stored format; the least
// magnitude that is taken, 0 for any; the factor that leaves binades free; whether it is a power of
// two.
struct ScaleRule {
  float largest;
  float least;
  float share;
  bool power_of_two;
};

// The scale, within 2^±126; 1 where the magnitude, a float32 by its bits, is 0, infinite or NaN.
// `inverse(x)`: 1 / x, rounded to nearest, as each product after it is in PyTorch's quotients.
// `bits`, `value`: of a float and back.
template <class Inverse, class Bits, class Value>
ATTNGEN_HD float scale_of_bits(u32 magnitude, const ScaleRule& rule, Inverse&& inverse, Bits&& bits,
                               Value&& value) {
  if (rule.least > 0.f && magnitude < bits(rule.least)) magnitude = bits(rule.least);
  if (magnitude == 0 || magnitude >= kInfinityBits) return 1.f;
  float scale = inverse(value(magnitude)) * rule.largest * rule.share;
  scale = scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;
  return rule.power_of_two ? value(bits(scale) & kInfinityBits) : scale;
}

}  // namespace attngen
