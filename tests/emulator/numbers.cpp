// Formats of 16 and 8 bits.
#include <algorithm>
#include <vector>

#include "cuda.hpp"

namespace emulator {
namespace {

struct Layout {
  int exponent_bits, mantissa_bits, bias;
  u32 largest;  // finite
  bool infinite;
  bool saturates;
};
constexpr Layout kLayouts[] = {
    {8, 7, 127, 0x7f7f, true, false},
    {5, 10, 15, 0x7bff, true, false},
    {4, 3, 7, 0x7e, false, true},
    {5, 2, 15, 0x7b, true, true},
};
const Layout& layout_of(Format format) { return kLayouts[static_cast<int>(format)]; }

float decode_one(const Layout& layout, u32 bits) {
  const int sign_place = layout.exponent_bits + layout.mantissa_bits;
  const float sign = bits >> sign_place & 1 ? -1.f : 1.f;
  const u32 magnitude = bits & ((1u << sign_place) - 1);
  if (magnitude > layout.largest) {
    const bool infinity = layout.infinite && magnitude == layout.largest + 1;
    return infinity ? sign * __builtin_inff() : __builtin_nanf("");
  }
  const int exponent = static_cast<int>(magnitude >> layout.mantissa_bits);
  const u32 mantissa = magnitude & ((1u << layout.mantissa_bits) - 1);
  const u32 leading = exponent ? 1u << layout.mantissa_bits : 0;
  const int power = std::max(exponent, 1) - layout.bias - layout.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(leading + mantissa), power);
}

std::vector<float> decode_all(Format format) {
  const Layout& layout = layout_of(format);
  std::vector<float> values(size_t{2} << (layout.exponent_bits + layout.mantissa_bits));
  for (u32 i = 0; i < values.size(); ++i) values[i] = decode_one(layout, i);
  return values;
}
const std::vector<float> kDecoded[] = {decode_all(Format::kBf16), decode_all(Format::kFp16),
                                       decode_all(Format::kE4m3), decode_all(Format::kE5m2)};

}  // namespace

float decode(Format format, u32 bits) { return kDecoded[static_cast<int>(format)][bits]; }

u32 encode(Format format, float x) {
  const Layout& layout = layout_of(format);
  const u32 sign = (std::signbit(x) ? 1u : 0u) << (layout.exponent_bits + layout.mantissa_bits);
  const float magnitude = std::fabs(x);
  if (x != x) return layout.saturates ? 0x7f : 0x7fff;
  if (magnitude == 0.f) return sign;
  const u32 beyond = layout.largest + (layout.saturates ? 0 : 1);
  if (magnitude == __builtin_inff()) return sign | beyond;
  int exponent;
  std::frexp(magnitude, &exponent);
  const int lowest = std::max(exponent - 1, 1 - layout.bias);
  // Up to 2^(mantissa_bits + 1), which carries into the exponent as it should.
  const float units = std::nearbyint(std::ldexp(magnitude, layout.mantissa_bits - lowest));
  const int before = lowest + layout.bias - 1;
  const double bits = std::ldexp(before, layout.mantissa_bits) + units;
  return sign | (bits > layout.largest ? beyond : static_cast<u32>(bits));
}

u32 permute(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | static_cast<u64>(high) << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> i * 4 & 0xf;
    const auto byte = static_cast<u32>(bytes >> (nibble & 7) * 8 & 0xff);
    result |= (nibble < 8 ? byte : byte >> 7 ? 0xff : 0) << i * 8;  // from 8 on its sign
  }
  return result;
}

}  // namespace emulator
