// Weights of blocks with rows whose log-sum-exp shows no sum: one pair of scores after the other,
// in few instructions, since such blocks are rare.
#pragma once

#include "attngen/platform.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

// Replaces neighbours x[i] and x[i + 1] of an accumulator by what `weigh(i, first, second)` makes
// of them, and words[i / 2] by what that returns, where there are words.
template <int kCount, class Weigh>
ATTNGEN_DEVICE void replace_pairs(float (&x)[kCount], u32* words, Weigh weigh) {
#pragma unroll 1
  for (int i = 0; i < kCount; i += 2) {
    float first = 0.f;
    float second = 0.f;
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      first = k == i ? x[k] : first;
      second = k == i ? x[k + 1] : second;
    }
    const u32 word = weigh(i, first, second);
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      x[k] = k == i ? first : x[k];
      x[k + 1] = k == i ? second : x[k + 1];
      if (words) words[k / 2] = k == i ? word : words[k / 2];
    }
  }
}

// The weight of a scaled score beside a row's `reference`: what its weights are relative to, and
// log2 of their sum. None is more than 1, whatever rounding makes of large numbers.
ATTNGEN_DEVICE float weight_beside(float score, float2 reference) {
  return exp2_approx(fminf((score - reference.x) * kLog2E - reference.y, 0.f));
}

}  // namespace attngen
