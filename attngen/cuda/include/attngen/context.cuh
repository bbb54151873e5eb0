// What a fragment may know of the tile at hand, and the intervals that masks speak in.
#pragma once

#include "attngen/platform.cuh"
#include "attngen/span.cuh"

namespace attngen {

// One (batch, query head) of the problem. Lengths are those of this sequence; `delta` aligns the
// diagonal: query i sits at key position i + delta (0 top-left, kv_len - q_len bottom-right).
struct Context {
  int batch;
  int head;
  int q_len;
  int kv_len;
  int delta;
};

// A sequence in a tensor map that ends where the sequence does: its length, and its first token or
// the index of the batch dimension. Its position 0 is row kLongest - length.
struct SequenceIndex {
  int length;
  int start;
};
constexpr int kLongest = 1 << 30;

// Where a score stands: query i and key j, `distance + step` keys past the query's diagonal
// (j - i - delta). Elements are handled line by line: within one `distance` is the same and `step`
// a constant, so that a term linear in it takes one multiply-add. kPast: a mask hides whatever is
// past the diagonal, so that a score there need not be right. `tile` is element [i, j] of what the
// score reads in tiles, in the kernel's units. kLines, kTurned: what keys and
// distances, or queries and distances, have in common is at hand. kDerived: the derivative is asked
// for, too.
template <bool kPastHidden>
struct Place {
  static constexpr bool kPast = kPastHidden;
  static constexpr bool kLines = false;
  static constexpr bool kTurned = false;
  static constexpr bool kDerived = false;
  int i;
  int j;
  float distance;
  float step;
  float tile = 0.f;
  // Whether the result of a score that a mask hides does not matter, or no mask hides it.
  ATTNGEN_HD static constexpr bool is_whole() { return false; }
};

template <bool kPastHidden>
struct DerivedPlace : Place<kPastHidden> {
  static constexpr bool kDerived = true;
};

// A query and a key alone.
struct ScoreSpot {
  static constexpr bool kLines = false;
  static constexpr bool kTurned = false;
  int i;
  int j;
};

// Positions [lo, hi); empty when hi <= lo.
struct Range {
  int lo;
  int hi;
};

// Element `index` of a tensor of float32 that the launch only reads.
ATTNGEN_HD float read_operand(const void* tensor, int index) {
#if defined(__CUDACC__)
  return __ldg(static_cast<const float*>(tensor) + index);
#else
  return static_cast<const float*>(tensor)[index];
#endif
}

ATTNGEN_HD Range intersect(Range a, Range b) { return {max_of(a.lo, b.lo), min_of(a.hi, b.hi)}; }

}  // namespace attngen
