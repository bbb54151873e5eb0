// bwd_prepare__causal_pre_scale_bias_d128_bf16__5cab08
// Rendered by attngen from kernels/bwd_prepare.cu.j2; do not edit.
#include "attngen/platform.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kHeadDimV = 128;
constexpr int kTileM = 64;
constexpr int kLanes = 8;  // threads a row
constexpr int kChunks = kHeadDimV / 8;  // of 16 bytes
constexpr int kThreads = 256;
using Element = Bf16;

struct Params {
  void* o;
  void* d_o;
  void* lse;
  void* dlse;
  void* lse_log2;
  void* d;
  void* turns;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long d_o_stride_row;
  long long d_o_stride_head;
  long long d_o_stride_batch;
  int q_len;
  int heads_q;
  int q_blocks;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 120, "packed by the host");


}  // namespace attngen

// Grid: blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(256)
bwd_prepare__causal_pre_scale_bias_d128_bf16__5cab08(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  // The last ones first: their sums are in L2 when the main kernel has ended, and of the first ones the
  // output gradients when it begins.
  const int index = gridDim.x - 1 - blockIdx.x;
  const int block = index;
  const int head = gridDim.y - 1 - blockIdx.y;
  const int batch = gridDim.z - 1 - blockIdx.z;

  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;

  if (threadIdx.x == 0) static_cast<int*>(p.turns)[slot] = 0;

  const int lane = threadIdx.x % kLanes;
  for (int within = threadIdx.x / kLanes; within < kTileM; within += kThreads / kLanes) {
    const int row = block * kTileM + within;
    float sum = 0.f;
    if (row < p.q_len) {
      const char* o = static_cast<const char*>(p.o) + 2 * (batch * p.o_stride_batch + head * p.o_stride_head + row * p.o_stride_row);
      const char* d_o = static_cast<const char*>(p.d_o) + 2 * (batch * p.d_o_stride_batch + head * p.d_o_stride_head + row * p.d_o_stride_row);
#pragma unroll
      for (int chunk = lane; chunk < kChunks; chunk += kLanes) {
        const uint4 a = *reinterpret_cast<const uint4*>(o + chunk * 16);
        const uint4 b = *reinterpret_cast<const uint4*>(d_o + chunk * 16);
        sum += dot<Element>(a.x, b.x) + dot<Element>(a.y, b.y) + dot<Element>(a.z, b.z) + dot<Element>(a.w, b.w);
      }
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) {
      // Padding and rows that see no key get an LSE of +inf, and so weights of 0; what comes in for
      // the LSE of the latter, NaN where two of them were joined, must not reach a product.
      float lse_log2 = kInfinity;
      if (row < p.q_len) {
        const long long at = (static_cast<long long>(batch) * p.heads_q + head) * p.q_len + row;
        const float lse = static_cast<const float*>(p.lse)[at];
        if (lse != -kInfinity) lse_log2 = lse * kLog2E;
        if (p.dlse != nullptr && lse != -kInfinity) sum -= static_cast<const float*>(p.dlse)[at];
      }
      static_cast<float*>(p.lse_log2)[slot * kTileM + within] = lse_log2;
      static_cast<float*>(p.d)[slot * kTileM + within] = sum;
    }
  }
}
