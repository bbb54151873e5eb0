// 8x8 matrices of 16-bit elements between fragments and shared memory.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_DEVICE void load_matrix_x4(u32* fragment, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
// As load_matrix_x4, each matrix transposed.
ATTNGEN_DEVICE void load_matrix_transposed_x4(u32* fragment, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
// Bytes of `low` (0 to 3) and `high` (4 to 7) as the four nibbles of `selector` say.
ATTNGEN_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}
// Four floats to 16 aligned bytes.
ATTNGEN_DEVICE void store_shared_x4(u32 address, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
ATTNGEN_DEVICE void load_shared_x4(float* x, u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}
ATTNGEN_DEVICE void store_shared(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
ATTNGEN_DEVICE void store_shared_16(u32 address, u32 low_half) {
  asm volatile("{\n.reg .b16 x;\ncvt.u16.u32 x, %1;\nst.shared.b16 [%0], x;\n}" ::"r"(address),
               "r"(low_half)
               : "memory");
}
ATTNGEN_DEVICE void store_matrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
ATTNGEN_DEVICE void store_matrix_x2(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a),
               "r"(b)
               : "memory");
}
// As store_matrix_x4, each matrix transposed.
ATTNGEN_DEVICE void store_matrix_transposed_x4(u32 address, const u32* fragment) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}
// Four registers to and from 16 aligned bytes of shared memory, two from 8.
ATTNGEN_DEVICE void store_shared_x4(u32 address, const u32* x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
ATTNGEN_DEVICE void load_shared_x4(u32* x, u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
ATTNGEN_DEVICE void load_shared_x2(u32* x, u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(address)
               : "memory");
}
ATTNGEN_DEVICE float load_shared(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
ATTNGEN_DEVICE float2 load_shared_pair(u32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

}  // namespace attngen
