// What a softmax fragment returns for a finished row, and what such fragments share.
#pragma once

#include "attngen/special.cuh"

namespace attngen {

// Up to this magnitude of a log-sum-exp, weights that are made of it are off by less than 2^-13.
constexpr float kFineLse = 700.f;

// Whether it is of scores so large that it shows no sum.
ATTNGEN_HD bool is_large(float lse) {
  const float magnitude = magnitude_of(lse);
  return magnitude > kFineLse && magnitude != kInfinity;
}

// An LSE as weights 2^(S - LSE) want it: +inf, beside which they are 0, of a row that sees no key,
// and of scores from 2^24 on, beside which float32 has no weight.
ATTNGEN_HD float lse_in_log2(float lse) {
  return magnitude_of(lse) < 0x1p24f ? lse * kLog2E : lse == lse ? kInfinity : lse;
}

struct SoftmaxRow {
  float normalizer;  // multiplies the accumulated output
  float lse;         // natural log of the sum of exp(S)
};

// A row beside a sink, a score that has a weight but no value. `sum` is that of the weights
// relative to the largest score's; a row that sees no key has only its sink.
ATTNGEN_HD SoftmaxRow finalize_with_sink(float largest, float sum, float sink) {
  if (sum == 0.f) return {0.f, sink};
  const float top = max_of(largest, sink);  // so that neither weight overflows
  const float weight = exp2_of((largest - top) * kLog2E);
  const float total = sum * weight + exp2_of((sink - top) * kLog2E);
  return {weight / total, top + log2_of(total) * kLn2};
}

}  // namespace attngen
