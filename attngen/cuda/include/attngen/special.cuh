// Functions of the special-function unit for code that a host compiles too.
#pragma once

#include "attngen/platform.cuh"

#if defined(__CUDACC__)
#include "attngen/ptx/math.cuh"
#endif

namespace attngen {

#if defined(__CUDACC__)
ATTNGEN_DEVICE float log2_of(float x) { return log2_approx(x); }
ATTNGEN_DEVICE float exp2_of(float x) { return exp2_approx(x); }
ATTNGEN_DEVICE float reciprocal_of(float x) { return reciprocal_approx(x); }
ATTNGEN_DEVICE float magnitude_of(float x) { return fabsf(x); }
#else
inline float magnitude_of(float x) { return __builtin_fabsf(x); }
inline float log2_of(float x) { return __builtin_log2f(x); }
inline float exp2_of(float x) { return __builtin_exp2f(x); }
inline float reciprocal_of(float x) { return 1.f / x; }
#endif

}  // namespace attngen
