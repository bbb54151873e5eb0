// A row's attention over some keys joined with that over others.
#pragma once

#include "attngen/special.cuh"

namespace attngen {

struct JoinedRow {
  float kept;   // share of what was there
  float share;  // and of what joins it
  float lse;    // natural log of the sum of exp(S) of both
};

// Both log-sum-exps may be -inf, of rows that have seen no key.
ATTNGEN_HD JoinedRow join_rows(float before, float lse) {
  const float top = max_of(before, lse);
  if (top == -kInfinity) return {0.f, 0.f, -kInfinity};
  const float old_weight = exp2_of((before - top) * kLog2E);
  const float weight = exp2_of((lse - top) * kLog2E);
  const float total = old_weight + weight;
  return {old_weight / total, weight / total, top + log2_of(total) * kLn2};
}

}  // namespace attngen
