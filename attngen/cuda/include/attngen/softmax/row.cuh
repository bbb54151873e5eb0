// What a softmax fragment returns for a finished row, and what such fragments share.
#pragma once

#include "attngen/special.cuh"

namespace attngen {

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
