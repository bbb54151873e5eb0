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
// 8-bit formats: rounded to nearest even, what is out of range becomes the largest finite value.
struct E4m3 {
  // Two floats as bytes in the low half, `low` first.
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("{\n.reg .b16 x;\ncvt.rn.satfinite.e4m3x2.f32 x, %1, %2;\ncvt.u32.u16 %0, x;\n}"
        : "=r"(packed)
        : "f"(high), "f"(low));
    return packed;
  }
  // Four floats as bytes, `a` first.
  ATTNGEN_DEVICE static u32 pack(float a, float b, float c, float d) {
    u32 packed;
    asm("{\n.reg .b16 x, y;\ncvt.rn.satfinite.e4m3x2.f32 x, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 y, %4, %3;\nmov.b32 %0, {x, y};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
  }
};
struct E5m2 {
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("{\n.reg .b16 x;\ncvt.rn.satfinite.e5m2x2.f32 x, %1, %2;\ncvt.u32.u16 %0, x;\n}"
        : "=r"(packed)
        : "f"(high), "f"(low));
    return packed;
  }
};

}  // namespace attngen
