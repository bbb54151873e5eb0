// Lines of a tile of scores: what all scores of a key, or of a distance, have in common, which a
// warp works out for a block of keys and reads for each score.
#pragma once

#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"
#if defined(__CUDACC__)
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#endif

namespace attngen {

// A place that also says what its key and its distance have, kColumns and kDistances numbers.
template <bool kPastHidden, int kColumns, int kDistances>
struct LinedPlace : Place<kPastHidden> {
  static constexpr bool kLines = kColumns + kDistances > 0;
  float columns[max_of(kColumns, 1)];
  float distances[max_of(kDistances, 1)];
  ATTNGEN_HD static constexpr bool is_whole() { return true; }
};
// Whether it is whole is known of each.
template <bool kPastHidden, int kColumns, int kDistances>
struct LearnedPlace : Place<kPastHidden> {
  static constexpr bool kLines = kColumns + kDistances > 0;
  float columns[max_of(kColumns, 1)];
  float distances[max_of(kDistances, 1)];
  bool whole;
  ATTNGEN_HD bool is_whole() const { return whole; }
};

// Of keys as rows: what its query and its distance have.
template <bool kPastHidden, int kRows, int kDistances>
struct TurnedPlace : Place<kPastHidden> {
  static constexpr bool kTurned = true;
  float rows[max_of(kRows, 1)];
  float distances[max_of(kDistances, 1)];
};

#if defined(__CUDACC__)
// Lines of a warp's 16 rows and kN columns, in memory of its own: distances from that of the last
// row and the first column on. Columns are keys, or, kTurned, queries.
template <int kN, int kColumns, int kDistances, bool kTurned = false>
struct ScoreLines {
  static constexpr int kRows = 16;
  static constexpr int kSpan = kN + kRows;  // one more than there are
  static constexpr u32 kDistancePlace = kN * kColumns * 4;
  static constexpr u32 kBytes = kDistancePlace + kSpan * kDistances * 4;
  u32 base;
  int lane;

  // A lane's share of them.
  struct Share {
    float columns[ceil_div(kN, 32)][max_of(kColumns, 1)];
    float distances[ceil_div(kSpan, 32)][max_of(kDistances, 1)];
  };
  // What a thread's scores of a group of eight columns have: its two keys, and the distances of its
  // first row, and of the row 8 below, which are those of the group before.
  struct Group {
    float2 columns[max_of(kColumns, 1)];
    float2 distances[max_of(kDistances, 1)];
    float2 before[max_of(kDistances, 1)];
  };

  // Works out a lane's share for the keys from `key` on and the queries from `query` on.
  template <class Score>
  ATTNGEN_DEVICE void make(Share& share, const Score& score, const Context& ctx, int key,
                           int query) const {
    if constexpr (kColumns > 0) {
#pragma unroll
      for (int i = 0; i < ceil_div(kN, 32); ++i) {
        if constexpr (kTurned) {
          score.make_row(ctx, query + i * 32 + lane, share.columns[i]);
        } else {
          score.make_column(ctx, key + i * 32 + lane, share.columns[i]);
        }
      }
    }
    if constexpr (kDistances > 0) {
#pragma unroll
      for (int i = 0; i < ceil_div(kSpan, 32); ++i) {
        const int step = i * 32 + lane - (kRows - 1);
        const int distance = key - query + (kTurned ? -step : step);
        score.make_distance(ctx, distance, share.distances[i]);
      }
    }
  }
  // Has a share read now, and not only where it is laid down.
  ATTNGEN_DEVICE static void settle(Share& share) {
#pragma unroll
    for (auto& columns : share.columns) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) columns[n] = forget_float(columns[n]);
    }
#pragma unroll
    for (auto& distances : share.distances) {
#pragma unroll
      for (int n = 0; n < kDistances; ++n) distances[n] = forget_float(distances[n]);
    }
  }
  // Lays a block's down, once the warp is done with the block before.
  ATTNGEN_DEVICE void put(const Share& share) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ceil_div(kN, 32); ++i) {
      if ((i + 1) * 32 > kN && i * 32 + lane >= kN) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        store_shared(base + (n * kN + i * 32 + lane) * 4, share.columns[i][n]);
      }
    }
#pragma unroll
    for (int i = 0; i < ceil_div(kSpan, 32); ++i) {
      if ((i + 1) * 32 > kSpan && i * 32 + lane >= kSpan) continue;
#pragma unroll
      for (int n = 0; n < kDistances; ++n) {
        const u32 place = base + kDistancePlace + (n * kSpan + i * 32 + lane) * 4;
        store_shared(place, share.distances[i][n]);
      }
    }
    __syncwarp();
  }
  // Reads what the group has that element `i`, its first, begins.
  ATTNGEN_DEVICE void take(Group& group, int i) const {
    const int column = (lane & 3) * 2 + fragment_column(i);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      group.columns[n] = load_shared_pair(base + (n * kN + column) * 4);
    }
#pragma unroll
    for (int n = 0; n < kDistances; ++n) {
      group.before[n] = i == 0 ? pair(n, column - 8) : group.distances[n];
      group.distances[n] = pair(n, column);
    }
  }
  // The place of element `i` of a group, with what it has.
  template <class At>
  ATTNGEN_DEVICE static void fill(At& at, const Group& group, int i) {
    const auto of = [&](const float2& pair) { return i % 2 ? pair.y : pair.x; };
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if constexpr (kTurned) {
        at.rows[n] = of(group.columns[n]);
      } else {
        at.columns[n] = of(group.columns[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < kDistances; ++n) {
      at.distances[n] = of(fragment_row(i) ? group.before[n] : group.distances[n]);
    }
  }

 private:
  // The distances of the thread's first row and two keys from `column` on.
  ATTNGEN_DEVICE float2 pair(int n, int column) const {
    const u32 place = base + kDistancePlace + (n * kSpan + column + kRows - 1 - lane / 4) * 4;
    return make_float2(load_shared(place), load_shared(place + 4));
  }
};
#endif

}  // namespace attngen
