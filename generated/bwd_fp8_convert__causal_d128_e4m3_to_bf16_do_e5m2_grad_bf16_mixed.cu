// bwd_fp8_convert__causal_d128_e4m3_to_bf16_do_e5m2_grad_bf16_mixed__9e5dce
// Rendered by attngen from kernels/wgmma/backward/fp8_convert.cu.j2; do not edit.
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale_gradients.cuh"
#include "attngen/scheduler/grid_place.cuh"

namespace attngen {

constexpr int kHeadDimQk = 128;
constexpr int kTileM = 64;
constexpr int kParts = 2;
constexpr int kColumns = 64;  // of a part
constexpr int kPartFloats = 64 * kColumns;
constexpr int kRows = 64;  // of a part
constexpr int kThreads = 128;
constexpr int kBytes = 2;  // of an element
// Padded so that what a warp writes at once falls on different banks.
constexpr int kPitch = kColumns * kBytes + 16;
using Gradient = Bf16;

struct Params {
  void* dq_acc;
  void* turns;
  void* dq;
  void* amax_dq;
  void* descale_dp;
  void* descale_k;
  long long dq_stride_row;
  long long dq_stride_head;
  long long dq_stride_batch;
  int q_len;
  int heads_q;
  int q_blocks;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 88, "packed by the host");

}  // namespace attngen

// Grid: parts of blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(128)
bwd_fp8_convert__causal_d128_e4m3_to_bf16_do_e5m2_grad_bf16_mixed__9e5dce(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ __align__(16) unsigned char rows[kRows * kPitch];
  const int ctas = p.q_blocks * kParts;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int block = index / kParts;
  const int batch = at.batches - 1 - at.batch;
  const int part = index % kParts;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;  // in the workspaces
  const bool summed = static_cast<const int*>(p.turns)[slot] > 0;
  const float4* acc = reinterpret_cast<const float4*>(static_cast<const float*>(p.dq_acc) + (slot * kParts + part) * kPartFloats);
  const float factor = limited(read_scale(p.descale_dp, 0) * read_scale(p.descale_k, 0));
  const float stored = factor;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  unsigned char* mine = rows + (warp * 16 + lane / 4) * kPitch + (lane & 3) * 2 * kBytes;
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float4 x = summed ? acc[i / 4 * kThreads + threadIdx.x] : make_float4(0.f, 0.f, 0.f, 0.f);
    largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
    auto* place = reinterpret_cast<u32*>(mine + fragment_column(i) * kBytes);
    *place = static_cast<u32>(Gradient::pack(x.x * stored, x.y * stored));
    place[8 * kPitch / sizeof(*place)] = static_cast<u32>(Gradient::pack(x.z * stored, x.w * stored));
  }
  if (p.amax_dq) atomic_max(static_cast<float*>(p.amax_dq), warp_max(largest) * factor, lane);
  __syncthreads();
  const int first_row = block * kTileM;
  const int first_column = part * kColumns;
  constexpr int kChunkColumns = 16 / kBytes;
  constexpr int kChunks = kColumns / kChunkColumns;
  char* dq = static_cast<char*>(p.dq) + kBytes * (batch * p.dq_stride_batch + head * p.dq_stride_head);
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int within = i / kChunks;
    const int row = first_row + within;
    const int column = first_column + i % kChunks * kChunkColumns;
    if (row < p.q_len && column < kHeadDimQk) {
      *reinterpret_cast<uint4*>(dq + kBytes * (row * p.dq_stride_row + column)) = *reinterpret_cast<const uint4*>(rows + within * kPitch + i % kChunks * 16);
    }
  }
}
