// What a softmax fragment returns for a finished row, and the logarithm it may use.
#pragma once

#include "attngen/platform.cuh"

#if defined(__CUDACC__)
#include "attngen/ptx/math.cuh"
#endif

namespace attngen {

struct SoftmaxRow {
  float normalizer;  // multiplies the accumulated output
  float lse;         // natural log of the sum of exp(S)
};

#if defined(__CUDACC__)
ATTNGEN_DEVICE float log2_of(float x) { return log2_approx(x); }
#else
inline float log2_of(float x) { return __builtin_log2f(x); }
#endif

}  // namespace attngen
