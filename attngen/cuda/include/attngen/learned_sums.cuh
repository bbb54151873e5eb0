// Sums of derivatives by numbers that a score reads: a warp's, gathered where neighbours read the
// same number, then added to the number's own in memory.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"

namespace attngen {

// Which elements of a warp's tile read the same number: all, those of a row, those of a column, or
// nobody knows.
enum class Reach { kTile, kRow, kColumn, kAny };

// An exact sum of floats: words of 24 bits each and as many of carries, of units of 2^-88 in the
// first; whatever the order of terms, the sum has the same bits. The word behind them counts terms
// that are no numbers. Bits below the first word's are dropped.
constexpr int kExactDigits = 9;
constexpr int kExactWords = kExactDigits + 1;
constexpr int kExactLowest = 88;

#if defined(__CUDACC__)
ATTNGEN_DEVICE void add_word(void* words, long long at, long long value) {
  atomicAdd(static_cast<unsigned long long*>(words) + at, static_cast<unsigned long long>(value));
}
// Adds a float to the exact sum of number `place`.
ATTNGEN_DEVICE void add_exactly(void* words, long long place, float value) {
  const u32 bits = __float_as_uint(value);
  const int exponent = bits >> 23 & 255;
  const long long first = place * kExactWords;
  if (exponent == 255) {
    add_word(words, first + kExactDigits, 1);
    return;
  }
  const int shift = max_of(exponent, 1) - 150 + kExactLowest;  // of the mantissa's last bit
  const u32 whole = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
  const u32 mantissa = shift < 0 ? whole >> min_of(-shift, 31) : whole;
  const int digit = max_of(shift, 0) / 24;
  const unsigned long long moved = static_cast<unsigned long long>(mantissa)
                                   << (max_of(shift, 0) % 24);
  const long long low = moved & 0xffffff;
  const long long high = moved >> 24;
  const bool negative = (bits >> 31) != 0;
  if (low != 0) add_word(words, first + digit, negative ? -low : low);
  if (high != 0) add_word(words, first + digit + 1, negative ? -high : high);
}

// A warp's sums of `kLoads` derivatives; `made` has the numbers' sums, exact or float32. Elements
// come row by row of a pair of columns, those of all lanes at once.
template <int kLoads, bool kExact>
struct LearnedSums {
  static constexpr Reach kTile = Reach::kTile;
  static constexpr Reach kRow = Reach::kRow;
  static constexpr Reach kColumn = Reach::kColumn;
  static constexpr Reach kAny = Reach::kAny;

  void* made;
  int lane;
  int half;  // which of its two rows an element belongs to
  float sums[kLoads][2];
  long long places[kLoads][2];

  ATTNGEN_DEVICE LearnedSums(void* made, int lane) : made(made), lane(lane), half(0) {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      sums[load][0] = sums[load][1] = 0.f;
      places[load][0] = places[load][1] = 0;
    }
  }
  // Adds an element's derivative by what load `kLoad` read at `place`.
  template <int kLoad, Reach kReach>
  ATTNGEN_DEVICE void add(long long place, float value) {
    if constexpr (kReach == Reach::kTile) {
      sums[kLoad][0] += value;
      places[kLoad][0] = place;
    } else if constexpr (kReach == Reach::kRow) {
      sums[kLoad][half] += value;
      places[kLoad][half] = place;
    } else if constexpr (kReach == Reach::kColumn) {
      sums[kLoad][0] = half == 0 ? value : sums[kLoad][0] + value;
      if (half == 0) return;
      float all = sums[kLoad][0];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        all += __shfl_xor_sync(~0u, all, distance);
      }
      if (lane < 4) store(place, all);
    } else {
      // Neighbours often read the same number: a run of elements of all lanes leaves one term.
      if (__any_sync(~0u, place != places[kLoad][0])) {
        leave(places[kLoad][0], sums[kLoad][0]);
        places[kLoad][0] = place;
        sums[kLoad][0] = value;
      } else {
        sums[kLoad][0] += value;
      }
    }
  }
  // Leaves what load `kLoad` has gathered; the rows, or the sequence and head, change behind it.
  template <int kLoad, Reach kReach>
  ATTNGEN_DEVICE void finish() {
    if constexpr (kReach == Reach::kTile) {
      const float all = warp_sum(sums[kLoad][0]);
      if (lane == 0) store(places[kLoad][0], all);
    } else if constexpr (kReach == Reach::kRow) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float all = quad_sum(sums[kLoad][row]);
        if (lane % 4 == 0) store(places[kLoad][row], all);
      }
    } else if constexpr (kReach == Reach::kAny) {
      leave(places[kLoad][0], sums[kLoad][0]);
    }
    sums[kLoad][0] = sums[kLoad][1] = 0.f;
  }

 private:
  ATTNGEN_DEVICE void leave(long long place, float value) const {
    const u32 low = static_cast<u32>(place);
    const u32 high = static_cast<u32>(place >> 32);
    const u32 other = __shfl_sync(~0u, high, 0);
    const bool same = low == __shfl_sync(~0u, low, 0) && high == other;
    if (__all_sync(~0u, same)) {
      value = warp_sum(value);
      if (lane > 0) value = 0.f;
    }
    store(place, value);
  }
  ATTNGEN_DEVICE void store(long long place, float value) const {
    if (value == 0.f) return;
    if constexpr (kExact) {
      add_exactly(made, place, value);
    } else {
      atomicAdd(static_cast<float*>(made) + place, value);
    }
  }
};
#endif

}  // namespace attngen
