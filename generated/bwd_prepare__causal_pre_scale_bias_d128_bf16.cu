// bwd_prepare__causal_pre_scale_bias_d128_bf16__41c8e8
// Rendered by attngen from kernels/support/prepare.cu.j2; do not edit.
#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/softmax/row.cuh"
#include "attngen/scheduler/grid_place.cuh"

namespace attngen {

constexpr int kHeadDimV = 128;
constexpr int kTileM = 64;
constexpr int kLanes = 8;  // threads a row
constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kLanes;
constexpr int kRows = ceil_div(kTileM, kGroups);  // of a group
static_assert(kTileM <= kThreads);
constexpr int kChunks = kHeadDimV / 8;  // of 16 bytes
constexpr int kSteps = ceil_div(kChunks, kLanes);
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
bwd_prepare__causal_pre_scale_bias_d128_bf16__41c8e8(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  allow_dependents();  // the main kernel waits for this one's end where it needs it
  const int ctas = p.q_blocks;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int block = index;
  const int batch = at.batches - 1 - at.batch;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;  // in the workspaces
  if (threadIdx.x == 0) static_cast<int*>(p.turns)[slot] = 0;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const char* o = static_cast<const char*>(p.o) + 2 * (batch * p.o_stride_batch + head * p.o_stride_head);
  const char* d_o = static_cast<const char*>(p.d_o) + 2 * (batch * p.d_o_stride_batch + head * p.d_o_stride_head);
  __shared__ float sums[kTileM];
  // All that a thread reads is on its way before its first sum.
  const int own_row = block * kTileM + threadIdx.x;  // whose LSE and D the thread writes
  float lse = -kInfinity;
  float dlse = 0.f;
  if (threadIdx.x < kTileM && own_row < p.q_len) {
    const long long at = (static_cast<long long>(batch) * p.heads_q + head) * p.q_len + own_row;
    lse = static_cast<const float*>(p.lse)[at];
    if (p.dlse != nullptr) dlse = static_cast<const float*>(p.dlse)[at];
  }
  uint4 a[kRows][kSteps];
  uint4 b[kRows][kSteps];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int within = group + i * kGroups;
    const int row = block * kTileM + within;
    const bool read = within < kTileM && row < p.q_len;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int chunk = lane + k * kLanes;
      a[i][k] = b[i][k] = make_uint4(0, 0, 0, 0);
      if (read && chunk < kChunks) {
        a[i][k] = load_once(o + 2 * (row * p.o_stride_row) + chunk * 16);
        b[i][k] = load_once(d_o + 2 * (row * p.d_o_stride_row) + chunk * 16);
      }
    }
  }
  schedule_fence();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int within = group + i * kGroups;
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      sum += dot<Element>(a[i][k].x, b[i][k].x) + dot<Element>(a[i][k].y, b[i][k].y) + dot<Element>(a[i][k].z, b[i][k].z) + dot<Element>(a[i][k].w, b[i][k].w);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0 && within < kTileM) sums[within] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kTileM) {
    // Padding and rows that see no key get an LSE of +inf, and so weights of 0. The gradient of the LSE of such
    // rows, NaN where two of them were joined, must not reach a product.
    const bool seen = lse != -kInfinity;
    const float sum = sums[threadIdx.x] - (seen ? dlse : 0.f);
    // Weights of rows whose LSE shows no sum, as of a large bias, are not made of it: -inf marks such rows.
    static_cast<float*>(p.lse_log2)[slot * kTileM + threadIdx.x] = is_large(lse) ? -kInfinity : lse_in_log2(lse);
    // Under dropout gradients of scores are relative to 1 / (1 - p).
    static_cast<float*>(p.d)[slot * kTileM + threadIdx.x] = sum;
  }
}
