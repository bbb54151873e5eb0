// Sums of derivatives by numbers that a score reads: a warp's, gathered where neighbours read the
// same number, then added to the number's own in memory.
#pragma once

#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/barrier.cuh"

namespace attngen {

// Which elements of a warp's tile read the same number: all, those of a row, those of a column,
// those as far from the diagonal, or nobody knows.
enum class Reach { kTile, kRow, kColumn, kDiagonal, kAny };

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

// Adds a derivative to that of number `place`: exactly, or to float32.
template <bool kExact>
ATTNGEN_DEVICE void add_derivative(void* made, long long place, float value) {
  if (value == 0.f) return;
  if constexpr (kExact) {
    add_exactly(made, place, value);
  } else {
    atomicAdd(static_cast<float*>(made) + place, value);
  }
}

// What a warp of 16 keys has summed over queries, or of queries over keys, one a thread at a time.
template <bool kExact>
struct LineSums {
  static constexpr Reach kTile = Reach::kTile;
  static constexpr Reach kRow = Reach::kRow;
  static constexpr Reach kColumn = Reach::kColumn;

  void* made;
  int lane;

  template <Reach kReach>
  ATTNGEN_DEVICE void add(long long place, float value) {
    const float all = kReach == Reach::kTile ? warp_sum(value) : quad_sum(value);
    const bool first = kReach == Reach::kTile ? lane == 0 : lane % 4 == 0;
    if (first) add_derivative<kExact>(made, place, all);
  }
};

// A warp's sums of `kLoads` derivatives; `made` has the numbers' sums, exact or float32. Elements
// come row by row of a pair of columns, those of all lanes at once.
template <int kLoads, bool kExact>
struct LearnedSums {
  static constexpr Reach kTile = Reach::kTile;
  static constexpr Reach kRow = Reach::kRow;
  static constexpr Reach kColumn = Reach::kColumn;
  static constexpr Reach kDiagonal = Reach::kAny;  // for which these have no place of their own
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
  // Adds an element's derivative by what load `kLoad` of a score read for it.
  template <int kLoad, Reach kReach, class Score, class At>
  ATTNGEN_DEVICE void add(const Score& score, const Context& ctx, At at, float value) {
    const long long place = score.template place<kLoad>(ctx, at);
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
    } else if constexpr (kReach != Reach::kColumn) {
      leave(places[kLoad][0], sums[kLoad][0]);
    }
    sums[kLoad][0] = sums[kLoad][1] = 0.f;
  }

 protected:
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
    add_derivative<kExact>(made, place, value);
  }
};

// Sums of which load kOwn reads by distances, of a warpgroup's 64 rows and blocks of kColumns keys
// that follow each other. A warp's rows lie in shared memory shifted against each other, so that a
// distance is a column; what later blocks of the rows add to is carried on to them. A thread's
// element of its second row has the distance of that of its first row 8 columns before.
template <int kLoads, bool kExact, int kColumns, int kOwn>
struct DistanceSums : LearnedSums<kLoads, kExact> {
  using Others = LearnedSums<kLoads, kExact>;
  static constexpr Reach kDiagonal = Reach::kDiagonal;
  static constexpr int kWarps = 4;
  static constexpr int kRows = 16;  // of a warp
  static constexpr int kPart = kRows - 1 + kColumns;
  static constexpr int kAll = kWarps * kRows - 1 + kColumns;
  static constexpr int kCarried = kAll - kColumns;
  static constexpr int kPitch = kPart + (kPart + 1) % 2;  // rows begin in other banks
  static_assert(kColumns % 32 == 0 && kAll <= kWarps * 32, "a thread has a distance");
  struct Shared {
    float rows[kWarps][kRows / 2 * kPitch];
    float parts[2][kWarps][kPart + 1];  // of one block, and the next
    float carried[2][kCarried + 1];
  };

  Shared* shared;  // the warpgroup's own
  int warp;
  u32 barrier;
  int turn;       // of the two places
  int column;     // of the thread's elements at hand
  float2 before;  // of the first row, of the group of columns before
  float2 next;    // and of the one at hand

  ATTNGEN_DEVICE DistanceSums(void* made, int lane, Shared* shared, int warp, u32 barrier)
      : Others(made, lane), shared(shared), warp(warp), barrier(barrier), turn(0), column(0) {
    before = next = make_float2(0.f, 0.f);
    for (int i = lane; i < kRows / 2 * kPitch; i += 32) shared->rows[warp][i] = 0.f;
    if (thread() < kCarried) shared->carried[0][thread()] = 0.f;
    __syncwarp();
  }
  template <int kLoad, Reach kReach, class Score, class At>
  ATTNGEN_DEVICE void add(const Score& score, const Context& ctx, At at, float value) {
    if constexpr (kReach == Reach::kDiagonal) {
      const bool even = column % 2 == 0;
      if (this->half == 0) {
        (even ? next.x : next.y) = value;
      } else {
        lay_down(column - 8, (even ? before.x : before.y) + value);
        (even ? before.x : before.y) = even ? next.x : next.y;
      }
    } else {
      Others::template add<kLoad, kReach>(score, ctx, at, value);
    }
  }
  // Leaves what the elements of a tile have added, whose first row and key are `query` and `key`;
  // `last`: of its rows.
  template <class Score>
  ATTNGEN_DEVICE void finish_tile(const Score& score, const Context& ctx, int query, int key,
                                  bool last) {
    lay_down(kColumns - 8, before.x);
    lay_down(kColumns - 7, before.y);
    before = make_float2(0.f, 0.f);
    __syncwarp();
#pragma unroll
    for (int first = 0; first < kPart; first += 32) {
      const int distance = min_of(first + this->lane, kPart - 1);
      float all = 0.f;
#pragma unroll
      for (int row = 0; row < kRows / 2; ++row) all += shared->rows[warp][row * kPitch + distance];
      shared->parts[turn][warp][distance] = all;
    }
    named_barrier_sync(barrier, kWarps * 32);
    const int own = thread();
    float all = own < kCarried ? shared->carried[turn][own] : 0.f;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      const int distance = own - (kWarps - 1 - part) * kRows;
      if (distance >= 0 && distance < kPart) all += shared->parts[turn][part][distance];
    }
    turn ^= 1;
    if (own >= kColumns && own < kAll) shared->carried[turn][own - kColumns] = last ? 0.f : all;
    const bool done = own < (last ? kAll : kColumns);
    const ScoreSpot spot = {0, key - query + own - (kWarps * kRows - 1)};
    leave_runs(score.template place<kOwn>(ctx, spot), done ? all : 0.f);
  }
  template <int kLoad, Reach kReach>
  ATTNGEN_DEVICE void finish() {
    if constexpr (kReach != Reach::kDiagonal) Others::template finish<kLoad, kReach>();
  }

 private:
  ATTNGEN_DEVICE int thread() const { return warp * 32 + this->lane; }
  // Neighbours that read one number leave one term.
  ATTNGEN_DEVICE void leave_runs(long long place, float value) const {
    const u32 low = static_cast<u32>(place);
    const u32 high = static_cast<u32>(place >> 32);
    const u32 low_before = __shfl_up_sync(~0u, low, 1);
    const u32 high_before = __shfl_up_sync(~0u, high, 1);
    const bool differs = low != low_before || high != high_before;
    const u32 begun = __ballot_sync(~0u, this->lane == 0 || differs);
    const u32 before = begun << (31 - this->lane);  // the highest bit is the lane's own
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, value, step);
      if (before >> (32 - step) == 0) value += other;
    }
    const bool ends = this->lane == 31 || (begun >> this->lane >> 1 & 1) != 0;
    this->store(place, ends ? value : 0.f);
  }
  // An element of the first row, `step` columns behind the thread's first.
  ATTNGEN_DEVICE void lay_down(int step, float value) const {
    const int row = this->lane / 4;
    const int distance = (this->lane & 3) * 2 + step - row + kRows - 1;
    shared->rows[warp][row * kPitch + distance] = value;
  }
};
#endif

}  // namespace attngen
