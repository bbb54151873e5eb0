// What a softmax fragment returns for a finished row, and the logarithm it may use.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

struct SoftmaxRow {
  float normalizer;  // multiplies the accumulated output
  float lse;         // natural log of the sum of exp(S)
};

#if defined(__CUDACC__)
ATTNGEN_DEVICE float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
inline float log2_of(float x) { return __builtin_log2f(x); }
#endif

}  // namespace attngen
