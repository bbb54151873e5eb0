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
ATTNGEN_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// x, which is the same in all threads of the warp, as the compiler knows then: it need not keep it
// in a register of each thread.
ATTNGEN_DEVICE float uniform(float x) { return __shfl_sync(~0u, x, 0); }
// x, of which the compiler does not know that it is the same as before: what follows from it is not
// kept in registers from one pass of a loop to the next.
ATTNGEN_DEVICE int forget(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
ATTNGEN_DEVICE float forget_float(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
// The thread's place in its warp, read anew where a register to keep it in is dear.
ATTNGEN_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// A performance event that nobody counts: the compiler moves no instruction across it.
ATTNGEN_DEVICE void schedule_fence() { asm volatile("pmevent 1;" ::: "memory"); }
ATTNGEN_DEVICE u64 wide_product(u32 a, u32 b) {
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}
// 16-bit formats, two values a register.
struct Bf16 {
  static constexpr float kOfFp16One = 0x1p-7f;  // what the bits of float16's 1 are
  // Two floats rounded to nearest even; `low` in the low half.
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  // a b of each half.
  ATTNGEN_DEVICE static u32 multiply(u32 a, u32 b) {
    u32 packed;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(packed) : "r"(a), "r"(b));
    return packed;
  }
  // acc[16 x 8] += A B^T of the warp's fragments: 16 rows, 8 rows, of 16 columns each.
  ATTNGEN_DEVICE static void multiply_add(float* acc, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // As pack, with 0 for what is negative.
  ATTNGEN_DEVICE static u32 pack_positive(float low, float high) {
    u32 packed;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  ATTNGEN_DEVICE static float2 unpack(u32 packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  }
  // Two float16 that come from 8 bits, exactly.
  ATTNGEN_DEVICE static u32 from_widened(u32 packed);
};
struct Fp16 {
  static constexpr float kOfFp16One = 1.f;
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  // a b of each half.
  ATTNGEN_DEVICE static u32 multiply(u32 a, u32 b) {
    u32 packed;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(packed) : "r"(a), "r"(b));
    return packed;
  }
  // acc[16 x 8] += A B^T of the warp's fragments: 16 rows, 8 rows, of 16 columns each.
  ATTNGEN_DEVICE static void multiply_add(float* acc, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  ATTNGEN_DEVICE static u32 pack_positive(float low, float high) {
    u32 packed;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  ATTNGEN_DEVICE static float2 unpack(u32 packed) {
    float2 x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(packed));
    return x;
  }
  ATTNGEN_DEVICE static u32 from_widened(u32 packed) { return packed; }
  // a - b of each half, at least 0 and at most 1.
  ATTNGEN_DEVICE static u32 excess(u32 a, u32 b) {
    u32 packed;
    asm("sub.rn.sat.f16x2 %0, %1, %2;" : "=r"(packed) : "r"(a), "r"(b));
    return packed;
  }
  // a b + c of each half, rounded once.
  ATTNGEN_DEVICE static u32 fma(u32 a, u32 b, u32 c) {
    u32 packed;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(packed) : "r"(a), "r"(b), "r"(c));
    return packed;
  }
};
ATTNGEN_DEVICE u32 Bf16::from_widened(u32 packed) {
  const float2 x = Fp16::unpack(packed);
  return pack(x.x, x.y);
}
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
  // Four bytes as two pairs of float16, exactly.
  ATTNGEN_DEVICE static void widen(u32 (&pairs)[2], u32 bytes) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(bytes));
  }
};
struct E5m2 {
  // Four bytes as two pairs of float16, whose upper halves they are.
  ATTNGEN_DEVICE static void widen(u32 (&pairs)[2], u32 bytes) {
    asm("prmt.b32 %0, %1, 0, 0x1404;" : "=r"(pairs[0]) : "r"(bytes));
    asm("prmt.b32 %0, %1, 0, 0x3424;" : "=r"(pairs[1]) : "r"(bytes));
  }
  ATTNGEN_DEVICE static u32 pack(float low, float high) {
    u32 packed;
    asm("{\n.reg .b16 x;\ncvt.rn.satfinite.e5m2x2.f32 x, %1, %2;\ncvt.u32.u16 %0, x;\n}"
        : "=r"(packed)
        : "f"(high), "f"(low));
    return packed;
  }
};
// kCount floats as kCount / 2 pairs.
template <class Element, int kCount>
ATTNGEN_DEVICE void pack_pairs(u32* packed, const float* x) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = Element::pack(x[2 * i], x[2 * i + 1]);
}
// The same with 0 for what is negative.
template <class Element, int kCount>
ATTNGEN_DEVICE void pack_positive_pairs(u32* packed, const float* x) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = Element::pack_positive(x[2 * i], x[2 * i + 1]);
}
// Sum of the products of two packed pairs.
template <class Element>
ATTNGEN_DEVICE float dot(u32 a, u32 b) {
  const float2 x = Element::unpack(a);
  const float2 y = Element::unpack(b);
  return x.x * y.x + x.y * y.y;
}

}  // namespace attngen
