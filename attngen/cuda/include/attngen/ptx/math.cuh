// Single-instruction arithmetic of the special-function unit, and conversions that pack pairs.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
ATTNGEN_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
struct Bf16 {
  // Two floats rounded to nearest even; `low` in the low half.
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
};
struct Fp16 {
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
};

}  // namespace attngen
