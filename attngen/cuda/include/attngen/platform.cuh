// Qualifiers and integer names shared by kernels (NVRTC) and CPU tests (g++).
#pragma once

#if defined(__CUDACC__)
#define ATTNGEN_HD __device__ __forceinline__
#define ATTNGEN_DEVICE __device__ __forceinline__
#define ATTNGEN_UNROLL _Pragma("unroll")
#else
#define ATTNGEN_HD inline
#define ATTNGEN_UNROLL
#endif

namespace attngen {

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
ATTNGEN_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ATTNGEN_HD constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
ATTNGEN_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// A word whose lowest `count` bits are 1: all of them from 32 on, none up to 0.
ATTNGEN_HD constexpr u32 lowest_bits(int count) {
  return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1u;
}

}  // namespace attngen
