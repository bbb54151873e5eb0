// bwd_convert__causal_d128_bf16__0df625
// Rendered by attngen from kernels/bwd_convert.cu.j2; do not edit.
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kHeadDimQk = 128;
constexpr int kTileM = 64;
constexpr int kParts = 2;
constexpr int kColumns = 64;  // of a part
constexpr int kPartFloats = 64 * kColumns;
constexpr int kThreads = 128;
using Element = Bf16;

struct Params {
  void* dq_acc;
  void* turns;
  void* dq;
  long long dq_stride_row;
  long long dq_stride_head;
  long long dq_stride_batch;
  int q_len;
  int heads_q;
  int q_blocks;
  float scale;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 64, "packed by the host");


}  // namespace attngen

// Grid: parts of blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(128)
bwd_convert__causal_d128_bf16__0df625(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  // The last ones first: their sums are in L2 when the main kernel has ended.
  const int index = gridDim.x - 1 - blockIdx.x;
  const int block = index / kParts;
  const int part = index % kParts;
  const int head = gridDim.y - 1 - blockIdx.y;
  const int batch = gridDim.z - 1 - blockIdx.z;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;

  const bool summed = static_cast<const int*>(p.turns)[slot] > 0;
  const float4* acc = reinterpret_cast<const float4*>(static_cast<const float*>(p.dq_acc) + (slot * kParts + part) * kPartFloats) + threadIdx.x;
  // The part's rows in 16 bits, padded so that what a warp writes at once falls on different banks.
  constexpr int kRows = 64;
  constexpr int kPitch = kColumns + 8;
  __shared__ unsigned short __align__(16) rows[kRows * kPitch];
  unsigned short* mine = rows + (warp * 16 + lane / 4) * kPitch + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 4) {
    const float4 x = summed ? acc[i / 4 * kThreads] : make_float4(0.f, 0.f, 0.f, 0.f);
    u32* at = reinterpret_cast<u32*>(mine + fragment_column(i));
    at[0] = Element::pack(x.x * p.scale, x.y * p.scale);
    at[4 * kPitch] = Element::pack(x.z * p.scale, x.w * p.scale);
  }
  __syncthreads();
  constexpr int kChunks = kColumns / 8;  // of 16 bytes, a row
  const int first_row = block * kTileM;
  const int first_column = part * kColumns;
  char* dq = static_cast<char*>(p.dq) + 2 * (batch * p.dq_stride_batch + head * p.dq_stride_head);
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int within = i / kChunks;
    const int row = first_row + within;
    const int column = first_column + i % kChunks * 8;
    if (row < p.q_len && column < kHeadDimQk) {
      *reinterpret_cast<uint4*>(dq + 2 * (row * p.dq_stride_row + column)) = *reinterpret_cast<const uint4*>(rows + within * kPitch + i % kChunks * 8);
    }
  }
}
