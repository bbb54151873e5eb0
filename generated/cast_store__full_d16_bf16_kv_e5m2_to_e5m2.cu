// cast_store__full_d16_bf16_kv_e5m2_to_e5m2__3eb68c
// Rendered by attngen from kernels/support/cast_store.cu.j2; do not edit.
#include "attngen/cast/scale.cuh"
#include "attngen/cast/units.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kThreads = 512;
constexpr int kBatch = 4;  // units that a thread has asked for before it stores the first
constexpr float kLargest = 57344.0f;
using Element = Bf16;
using Stored = E5m2;

struct Params {
  void* from_0;
  void* from_1;
  void* from_2;
  void* to_0;
  void* to_1;
  void* to_2;
  void* parts;
  void* known;
  void* amax;
  void* scale;
  void* descale;
  float least;
  float share;
  long long count_0;
  long long count_1;
  long long count_2;
  int power_of_two;
  int tensors;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 128, "packed by the host");

ATTNGEN_DEVICE float scale_of(u32 magnitude, const Params& p) {
  return scale_of_bits(
      magnitude, {kLargest, p.least, p.share, p.power_of_two != 0}, [](float x) { return __fdiv_rn(1.f, x); },
      [](float x) { return __float_as_uint(x); }, [](u32 bits) { return __uint_as_float(bits); });
}

// The largest of the parts that the kernel before left of tensor `n`, by its bits.
ATTNGEN_DEVICE u32 largest_of_parts(const Params& p, int n, u32* shared) {
  const u32* parts = static_cast<const u32*>(p.parts) + n * gridDim.x;
  u32 most = 0;
  for (int part = threadIdx.x; part < gridDim.x; part += kThreads) most = max_of(most, parts[part]);
  return largest_of_cta<kThreads / 32>(most, shared);
}

// This CTA's part of a tensor in 8 bits.
ATTNGEN_DEVICE void store(const void* from, void* to, long long count, float scale) {
  const char* numbers = static_cast<const char*>(from);
  char* made = static_cast<char*>(to);
  const long long units = count / kPerUnit;
  for (long long first = static_cast<long long>(blockIdx.x) * kBatch * kThreads + threadIdx.x; first < units; first += static_cast<long long>(gridDim.x) * kBatch * kThreads) {
    uint4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const long long unit = first + i * kThreads;
      if (unit < units) batch[i] = load_once(numbers + unit * 16);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const long long unit = first + i * kThreads;
      if (unit < units) *reinterpret_cast<uint2*>(made + unit * 8) = stored_unit<Element, Stored>(batch[i], scale);
    }
  }
}

}  // namespace attngen

// Grid: one CTA an SM.
extern "C" __global__ void __launch_bounds__(512, 1)
cast_store__full_d16_bf16_kv_e5m2_to_e5m2__3eb68c(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ u32 shared[kThreads / 32];
  const auto* known = static_cast<const float*>(p.known);
  const bool notes = blockIdx.x == 0 && threadIdx.x == 0;
  if (p.tensors > 0) {
    const u32 largest = p.count_0 > 0 ? largest_of_parts(p, 0, shared) : 0;
    float scale = scale_of(largest, p);
    if (known != nullptr && known[0] > 0.f) scale = known[0];
    if (notes) {
      static_cast<float*>(p.amax)[0] = __uint_as_float(largest);
      static_cast<float*>(p.scale)[0] = scale;
      static_cast<float*>(p.descale)[0] = __fdiv_rn(1.f, scale);
    }
    store(p.from_0, p.to_0, p.count_0, scale);
  }
  if (p.tensors > 1) {
    const u32 largest = p.count_1 > 0 ? largest_of_parts(p, 1, shared) : 0;
    float scale = scale_of(largest, p);
    if (known != nullptr && known[1] > 0.f) scale = known[1];
    if (notes) {
      static_cast<float*>(p.amax)[1] = __uint_as_float(largest);
      static_cast<float*>(p.scale)[1] = scale;
      static_cast<float*>(p.descale)[1] = __fdiv_rn(1.f, scale);
    }
    store(p.from_1, p.to_1, p.count_1, scale);
  }
  if (p.tensors > 2) {
    const u32 largest = p.count_2 > 0 ? largest_of_parts(p, 2, shared) : 0;
    float scale = scale_of(largest, p);
    if (known != nullptr && known[2] > 0.f) scale = known[2];
    if (notes) {
      static_cast<float*>(p.amax)[2] = __uint_as_float(largest);
      static_cast<float*>(p.scale)[2] = scale;
      static_cast<float*>(p.descale)[2] = __fdiv_rn(1.f, scale);
    }
    store(p.from_2, p.to_2, p.count_2, scale);
  }
}
