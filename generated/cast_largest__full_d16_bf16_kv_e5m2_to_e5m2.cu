// cast_largest__full_d16_bf16_kv_e5m2_to_e5m2__a3be72
// Rendered by attngen from kernels/support/cast_largest.cu.j2; do not edit.
#include "attngen/cast/units.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kThreads = 512;
constexpr int kBatch = 4;  // units that a thread has asked for before it looks at the first
using Element = Bf16;

struct Params {
  void* from_0;
  void* from_1;
  void* from_2;
  void* used_0;
  void* used_1;
  void* used_2;
  void* parts;
  long long count_0;
  long long count_1;
  long long count_2;
  int row_0;
  int row_1;
  int row_2;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 96, "packed by the host");

// The largest magnitude in this CTA's part of a tensor, by its bits. `used`: a byte for each row of
// `row` numbers, null where all count.
ATTNGEN_DEVICE u32 largest_of(const void* from, const void* used, long long count, int row, u32* shared) {
  const char* numbers = static_cast<const char*>(from);
  const auto* rows = static_cast<const unsigned char*>(used);
  const long long units = count / kPerUnit;
  u32 most = 0;
  for (long long first = static_cast<long long>(blockIdx.x) * kBatch * kThreads + threadIdx.x; first < units; first += static_cast<long long>(gridDim.x) * kBatch * kThreads) {
    uint4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const long long unit = first + i * kThreads;
      const bool counts = unit < units && (rows == nullptr || rows[unit * kPerUnit / row] != 0);
      batch[i] = counts ? *reinterpret_cast<const uint4*>(numbers + unit * 16) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) most = with_magnitudes(most, batch[i]);
  }
  return largest_of_cta<kThreads / 32>(magnitude_bits<Element>(most), shared);
}

}  // namespace attngen

// Grid: one CTA an SM.
extern "C" __global__ void __launch_bounds__(512, 1)
cast_largest__full_d16_bf16_kv_e5m2_to_e5m2__a3be72(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ u32 shared[kThreads / 32];
  u32* parts = static_cast<u32*>(p.parts) + blockIdx.x;
  if (p.count_0 > 0) {
    const u32 largest = largest_of(p.from_0, p.used_0, p.count_0, p.row_0, shared);
    if (threadIdx.x == 0) parts[0 * gridDim.x] = largest;
  }
  if (p.count_1 > 0) {
    const u32 largest = largest_of(p.from_1, p.used_1, p.count_1, p.row_1, shared);
    if (threadIdx.x == 0) parts[1 * gridDim.x] = largest;
  }
  if (p.count_2 > 0) {
    const u32 largest = largest_of(p.from_2, p.used_2, p.count_2, p.row_2, shared);
    if (threadIdx.x == 0) parts[2 * gridDim.x] = largest;
  }
}
