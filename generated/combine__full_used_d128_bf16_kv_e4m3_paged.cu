// combine__full_used_d128_bf16_kv_e4m3_paged__c2296f
// Rendered by attngen from kernels/support/combine.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

constexpr int kHeadDimV = 128;
constexpr int kPairs = ceil_div(kHeadDimV, 64);  // of columns, a lane
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kEarly = kPairs > 4 ? 3 : 4;  // parts that a warp asks for before it knows their weights
constexpr int kMaxSplits = 128;
using Element = Bf16;

struct VanillaSoftmax {
  // Factor that normalises the row's output, and its log-sum-exp (natural log), from the row's
  // largest scaled score and the sum of its weights relative to that one's.
  ATTNGEN_HD SoftmaxRow finalize(const Context&, float largest, float sum) const {
    if (sum == 0.f) return {0.f, -kInfinity};
    return {1.f / sum, largest + log2_of(sum) * kLn2};
  }
};
struct Params {
  void* o_parts;
  void* lse_parts;
  void* o;
  void* lse;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long total_rows;
  int q_len;
  int heads_q;
  int splits;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 80, "packed by the host");

}  // namespace attngen

// Grid: rows, which are a batch's heads, and a head's queries together.
extern "C" __global__ void __launch_bounds__(128, 10)
combine__full_used_d128_bf16_kv_e4m3_paged__c2296f(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x;
  // Not of a fixed size: CTAs ask for more, so that SMs have equal numbers of them.
  extern __shared__ __align__(16) unsigned char shared[];
  using Sums = float2[kPairs * 32];
  float* const weights = reinterpret_cast<float*>(shared);
  Sums* const sums = reinterpret_cast<Sums*>(weights + kMaxSplits);
  static_assert(2560 == 4 * kMaxSplits + kWarps * sizeof(Sums), "allocated by the host");
  const float* o_parts = static_cast<const float*>(p.o_parts) + static_cast<long long>(row) * kHeadDimV;
  const auto load = [&](float2 (&part)[kPairs], int split) {
    const float2* source = reinterpret_cast<const float2*>(o_parts + split * p.total_rows * kHeadDimV);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool there = split < p.splits && (i * 32 + lane) * 2 < kHeadDimV;
      part[i] = there ? source[i * 32 + lane] : make_float2(0.f, 0.f);
    }
  };
  float2 early[kEarly][kPairs];
#pragma unroll
  for (int n = 0; n < kEarly; ++n) load(early[n], warp + n * kWarps);
  // Every warp finds the maximum and the sum for itself: 4 loads a lane at most, and no barrier.
  const float2* lse_parts = static_cast<const float2*>(p.lse_parts) + row;
  float largest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    const int split = i * 32 + lane;
    largest = fmaxf(largest, split < p.splits ? lse_parts[split * p.total_rows].x : -kInfinity);
  }
  largest = warp_max(largest);
  if (largest == kInfinity) return;  // a row of no sequence, which the kernel before has cleared
  const float reference = largest == -kInfinity ? 0.f : largest;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / 32; ++i) {
    // Read again, from where it came before: registers are those of CTAs that share an SM.
    const int split = forget(i * 32 + lane);
    float2 part = make_float2(-kInfinity, 0.f);
    if (split < p.splits) part = static_cast<const float2*>(p.lse_parts)[split * p.total_rows + forget(row)];
    const float weight = part.x == -kInfinity ? 0.f : exp2_approx((part.x - reference) * kLog2E + part.y);
    sum += weight;
    if (warp == 0) weights[i * 32 + lane] = weight;
  }
  sum = warp_sum(sum);
  __syncthreads();
  float2 output[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) output[i] = make_float2(0.f, 0.f);
  const auto add = [&](const float2 (&part)[kPairs], float weight) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      output[i].x += part[i].x * weight;
      output[i].y += part[i].y * weight;
    }
  };
#pragma unroll
  for (int n = 0; n < kEarly; ++n) add(early[n], weights[warp + n * kWarps]);
#pragma unroll 4
  for (int split = warp + kEarly * kWarps; split < p.splits; split += kWarps) {
    float2 part[kPairs];
    load(part, split);
    add(part, weights[split]);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) sums[warp][i * 32 + lane] = output[i];
  __syncthreads();
  const int position = row % p.q_len;
  const int head = row / p.q_len % p.heads_q;
  const int batch = row / p.q_len / p.heads_q;
  const Context ctx = {batch, head, p.q_len, 0, 0};
  const SoftmaxRow result = VanillaSoftmax{}.finalize(ctx, largest, sum);
  if (threadIdx.x == 0) static_cast<float*>(p.lse)[row] = result.lse;
  char* o = static_cast<char*>(p.o) + 2 * (batch * p.o_stride_batch + position * p.o_stride_row + head * p.o_stride_head);
  for (int pair = threadIdx.x; pair * 2 < kHeadDimV; pair += kThreads) {
    float2 total = sums[0][pair];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      total.x += sums[i][pair].x;
      total.y += sums[i][pair].y;
    }
    reinterpret_cast<u32*>(o)[pair] = Element::pack(total.x * result.normalizer, total.y * result.normalizer);
  }
}
