// bwd_convert__causal_d128_bf16__152594
// Rendered by attngen from kernels/support/convert.cu.j2; do not edit.
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/grid_place.cuh"

namespace attngen {

constexpr int kHeadDimQk = 128;
constexpr int kTileM = 64;
constexpr int kParts = 2;
constexpr int kColumns = 64;  // of a part
constexpr int kPartFloats = 64 * kColumns;
constexpr int kDkColumns = 128;
constexpr int kDvColumns = 128;
constexpr int kHeadDimV = 128;
constexpr int kTileN = 128;
constexpr int kRows = 64;  // of a part
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
  void* dkv_acc;
  void* dk;
  void* dv;
  long long dk_stride_row;
  long long dk_stride_head;
  long long dk_stride_batch;
  long long dv_stride_row;
  long long dv_stride_head;
  long long dv_stride_batch;
  int key_parts;
  int heads_kv;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 152, "packed by the host");

// Elements a row of a part in 16 bits, padded so that what a warp writes at once falls on different banks.
template <int kN>
constexpr int kPitch = kN + 8;

// Rounds accumulator fragments of a part, or zeros, into `rows`.
template <int kN>
ATTNGEN_DEVICE void round_part(unsigned short* rows, const float4* acc, bool summed, float scale) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  unsigned short* mine = rows + (warp * 16 + lane / 4) * kPitch<kN> + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < kN / 2; i += 4) {
    const float4 x = summed ? acc[i / 4 * kThreads + threadIdx.x] : make_float4(0.f, 0.f, 0.f, 0.f);
    u32* at = reinterpret_cast<u32*>(mine + fragment_column(i));
    at[0] = Element::pack(x.x * scale, x.y * scale);
    at[4 * kPitch<kN>] = Element::pack(x.z * scale, x.w * scale);
  }
  __syncthreads();
}
// Stores rounded rows from position `first_row` of a sequence of `length`, whose first is row `start` of the tensor.
template <int kN, int kHeadDim>
ATTNGEN_DEVICE void store_rows(const unsigned short* rows, char* tensor, int start, int first_row, int length, int first_column, long long stride) {
  constexpr int kChunks = kN / 8;  // of 16 bytes, a row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int within = i / kChunks;
    const int row = first_row + within;
    const int column = first_column + i % kChunks * 8;
    if (row < length && column < kHeadDim) {
      *reinterpret_cast<uint4*>(tensor + 2 * ((start + row) * stride + column)) = *reinterpret_cast<const uint4*>(rows + within * kPitch<kN> + i % kChunks * 8);
    }
  }
}
// Converts a gradient of 64 keys, as many columns at a time as `rows` has room for.
template <int kN, int kHeadDim, int kFirst = 0>
ATTNGEN_DEVICE void convert_columns(unsigned short* rows, const float* sums, float scale, char* tensor, int start, int first_row, int length, long long stride) {
  constexpr int kNow = min_of(kN - kFirst, kColumns);
  round_part<kNow>(rows, reinterpret_cast<const float4*>(sums + kRows * kFirst), true, scale);
  store_rows<kNow, kHeadDim>(rows, tensor, start, first_row, length, kFirst, stride);
  __syncthreads();
  if constexpr (kFirst + kNow < kN) convert_columns<kN, kHeadDim, kFirst + kNow>(rows, sums, scale, tensor, start, first_row, length, stride);
}
// Converts dV and dK of 64 keys of a key head, from the sums of its query heads.
ATTNGEN_DEVICE void convert_keys(const Params& p, unsigned short* rows, int part, int head, int batch) {
  constexpr int kFloats = kRows * (kDvColumns + kDkColumns);
  const long long place = (static_cast<long long>(batch) * p.heads_kv + head) * p.key_parts + part;
  const float* sums = static_cast<const float*>(p.dkv_acc) + place * kFloats;
  const int first_row = part * kRows;
  const int length = p.kv_len;
  const int start = 0;
  char* dv = static_cast<char*>(p.dv) + 2 * (batch * p.dv_stride_batch + head * p.dv_stride_head);
  char* dk = static_cast<char*>(p.dk) + 2 * (batch * p.dk_stride_batch + head * p.dk_stride_head);
  convert_columns<kDvColumns, kHeadDimV>(rows, sums, 1.f, dv, start, first_row, length, p.dv_stride_row);
  convert_columns<kDkColumns, kHeadDimQk>(rows, sums + kRows * kDvColumns, p.scale, dk, start, first_row, length, p.dk_stride_row);
}

}  // namespace attngen

// Grid: parts of tiles of keys, then of blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(128)
bwd_convert__causal_d128_bf16__152594(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ unsigned short __align__(16) rows[kRows * kPitch<kColumns>];
  const int ctas = p.q_blocks * kParts + p.key_parts;
  const GridPlace at = grid_place(ctas, p.heads_q);
  if (at.index < p.key_parts) {
    if (at.head < p.heads_kv) convert_keys(p, rows, at.index, at.head, at.batch);
    return;
  }
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int block = index / kParts;
  const int batch = at.batches - 1 - at.batch;
  const int part = index % kParts;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;  // in the workspaces
  const bool summed = static_cast<const int*>(p.turns)[slot] > 0;
  const float4* acc = reinterpret_cast<const float4*>(static_cast<const float*>(p.dq_acc) + (slot * kParts + part) * kPartFloats);
  round_part<kColumns>(rows, acc, summed, p.scale);
  const int first_row = block * kTileM;
  const int first_column = part * kColumns;
  char* dq = static_cast<char*>(p.dq) + 2 * (batch * p.dq_stride_batch + head * p.dq_stride_head);
  store_rows<kColumns, kHeadDimQk>(rows, dq, 0, first_row, p.q_len, first_column, p.dq_stride_row);
}
