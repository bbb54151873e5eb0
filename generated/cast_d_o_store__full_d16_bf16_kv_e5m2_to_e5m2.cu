// cast_d_o_store__full_d16_bf16_kv_e5m2_to_e5m2__34c430
// Rendered by attngen from kernels/support/cast_d_o_store.cu.j2; do not edit.
#include "attngen/cast/gradient_scale.cuh"
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
  void* to_0;
  void* parts;
  void* descale_v;
  void* of_lse;
  void* noted;
  void* scale_dp;
  void* descale_dp;
  void* known;
  void* amax;
  void* scale;
  void* descale;
  float least;
  float share;
  float ds_bound;
  float of_softmax;
  long long count_0;
  long long count_v;
  int power_of_two;
  int mantissa_v;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 136, "packed by the host");

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

// The scale of dS where none is known: by a bound of the largest magnitudes of dO and V, and of the LSE's gradient.
ATTNGEN_DEVICE float own_scale_dp(const Params& p, float of_d_o, u32 of_v) {
  float v = value_of_byte(of_v, p.mantissa_v);
  if (p.descale_v != nullptr) v *= *static_cast<const float*>(p.descale_v);
  float bound = __fmul_rn(__fmul_rn(of_d_o, v), p.ds_bound);
  if (p.of_lse != nullptr) bound += *static_cast<const float*>(p.of_lse);
  return power_of_two_below(__fmul_rn(__fdiv_rn(1.f, __fmul_rn(bound, p.of_softmax)), kLargest));
}

}  // namespace attngen

// Grid: one CTA an SM.
extern "C" __global__ void __launch_bounds__(512, 1)
cast_d_o_store__full_d16_bf16_kv_e5m2_to_e5m2__34c430(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ u32 shared[kThreads / 32];
  const auto* known = static_cast<const float*>(p.known);
  const u32 largest = largest_of_parts(p, 0, shared);
  float scale = scale_of(largest, p);
  if (known != nullptr && known[0] > 0.f) scale = known[0];
  if (blockIdx.x == 0) {
    const u32 of_v = largest_of_parts(p, 1, shared);
    if (threadIdx.x == 0) {
      const float of_d_o = __uint_as_float(largest);
      float scale_dp = own_scale_dp(p, of_d_o, of_v);
      if (known != nullptr && known[1] > 0.f) scale_dp = known[1];
      *static_cast<float*>(p.amax) = of_d_o;
      *static_cast<float*>(p.scale) = scale;
      *static_cast<float*>(p.descale) = __fdiv_rn(1.f, scale);
      *static_cast<float*>(p.scale_dp) = scale_dp;
      *static_cast<float*>(p.descale_dp) = __fdiv_rn(1.f, scale_dp);
      auto* noted = static_cast<u32*>(p.noted);
      if (noted != nullptr) *noted = max_of(*noted, largest);
    }
  }
  store(p.from_0, p.to_0, p.count_0, scale);
}
