// What a fragment may know of the tile at hand, and the intervals that masks speak in.
#pragma once

#include "attngen/platform.cuh"

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

// Positions [lo, hi); empty when hi <= lo.
struct Range {
  int lo;
  int hi;
};

ATTNGEN_HD Range intersect(Range a, Range b) {
  return {max_of(a.lo, b.lo), min_of(a.hi, b.hi)};
}

// a + b without leaving int: an unbounded window is given as a huge b.
ATTNGEN_HD int saturating_add(int a, int b) {
  long long sum = static_cast<long long>(a) + b;
  return sum > 0x7fffffff ? 0x7fffffff : sum < -0x7fffffff ? -0x7fffffff : static_cast<int>(sum);
}

}  // namespace attngen
