// bwd_fp8_prepare__causal_d128_e4m3_to_bf16_do_e5m2_grad_bf16_mixed__1356e1
// Rendered by attngen from kernels/wgmma/backward/fp8_prepare.cu.j2; do not edit.
#include "attngen/mma/widen.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale_gradients.cuh"
#include "attngen/scheduler/grid_place.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kThreads = 256;
constexpr int kChunks = 8;  // of 16 bytes, a row in shared memory
constexpr int kGroups = kThreads / kChunks;
constexpr u32 kTurnedBytes = 32768;
constexpr u32 kTurnedKeyBytes = 32768;
constexpr int kKeyColumns = 128;
constexpr u32 kBlockBytes = kTileM * 128;  // of one operand of a block
constexpr u32 kSmemImage = 2 * kBlockBytes;
static_assert(kThreads == 256 && 2 * kTileM == kTileN, "a warpgroup for each half of a tile, or operand of a block");

using GradientElement = E5m2;
using OutputElement = Bf16;
using OperandElement = E4m3;
using WideElement = Bf16;

struct Params {
  void* q;
  void* k;
  void* o;
  void* d_o;
  void* lse;
  void* dlse;
  void* lse_log2;
  void* d;
  void* turns;
  void* queries_turned;
  void* keys_turned;
  void* descale_do;
  void* scale_s;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long d_o_stride_row;
  long long d_o_stride_head;
  long long d_o_stride_batch;
  int q_len;
  int kv_len;
  int tiles;
  int kv_blocks;
  int heads_q;
  int heads_kv;
  int q_blocks;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 232, "packed by the host");

// The place of 16 bytes of a row in a box that is swizzled over 128 bytes.
ATTNGEN_DEVICE u32 place_of(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) * 16); }

// Copies an image to memory.
template <u32 kBytes>
ATTNGEN_DEVICE void store_image(const unsigned char* image, void* images, long long place) {
  char* target = static_cast<char*>(images) + place * kBytes;
#pragma unroll
  for (u32 at = threadIdx.x * 16; at < kBytes; at += kThreads * 16) {
    *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(image + at);
  }
}

// Keys of a row follow each other as stage_transposed_bytes lays dS down.
ATTNGEN_DEVICE void turn_keys(const Params& p, unsigned char* shared) {
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const u32 smem = shared_address(shared);
#pragma unroll 1
  for (int index = cta; index < p.tiles; index += ctas) {
    const int place = index % p.kv_blocks;
    const int head = index / p.kv_blocks % p.heads_kv;
    const int batch = index / p.kv_blocks / p.heads_kv;
    const int tile = place;
    const int length = p.kv_len;
    if (tile * kTileN >= length) continue;  // no main kernel asks for it
    const char* k = static_cast<const char*>(p.k) + batch * p.k_stride_batch + head * p.k_stride_head;
#pragma unroll
    for (int i = 0; i < kTileN / kGroups; ++i) {
      const int within = threadIdx.x / kChunks + i * kGroups;
      const int chunk = threadIdx.x % kChunks;
      const int row = tile * kTileN + within;
      uint4 bytes = make_uint4(0, 0, 0, 0);
      if (row < length && chunk * 16 < kHeadDimQk) bytes = *reinterpret_cast<const uint4*>(k + row * p.k_stride_row + chunk * 16);
      *reinterpret_cast<uint4*>(shared + place_of(within, chunk)) = bytes;
    }
    __syncthreads();
    widen_tile<OperandElement, WideElement, kTileN, kKeyColumns, kThreads, 2 * kBlockBytes, 1024, 2 * kBlockBytes, 2>(smem, smem + kSmemImage, threadIdx.x, kTileN);
    __syncthreads();
    store_image<kTurnedKeyBytes>(shared + kSmemImage, p.keys_turned, index);
    __syncthreads();
  }
}
// Adds the products of four stored numbers of each.
ATTNGEN_DEVICE void add_products(float& sum, u32 d_o, u32 low, u32 high) {
  u32 a[2];
  GradientElement::widen(a, d_o);
  const float2 x = Fp16::unpack(a[0]);
  const float2 y = Fp16::unpack(a[1]);
  const float2 v = OutputElement::unpack(low);
  const float2 w = OutputElement::unpack(high);
  sum += x.x * v.x + x.y * v.y + y.x * w.x + y.y * w.y;
}
// Products of 16 columns; o: where the row's begin.
ATTNGEN_DEVICE float dot_of_chunk(uint4 d_o, const char* o) {
  float sum = 0.f;
  const uint4 x = load_once(o);
  const uint4 y = load_once(o + 16);
  add_products(sum, d_o.x, x.x, x.y);
  add_products(sum, d_o.y, x.z, x.w);
  add_products(sum, d_o.z, y.x, y.y);
  add_products(sum, d_o.w, y.z, y.w);
  return sum;
}

}  // namespace attngen

// Grid: blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(256, 3)
bwd_fp8_prepare__causal_d128_e4m3_to_bf16_do_e5m2_grad_bf16_mixed__1356e1(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  allow_dependents();  // the main kernel waits for this one's end where it needs it
  extern __shared__ __align__(1024) unsigned char shared[];
  turn_keys(p, shared);
  const int ctas = p.q_blocks;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int block = index;
  const int batch = at.batches - 1 - at.batch;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;  // in the workspaces
  if (threadIdx.x == 0) static_cast<int*>(p.turns)[slot] = 0;
  const int chunk = threadIdx.x % kChunks;
  const char* q = static_cast<const char*>(p.q) + batch * p.q_stride_batch + head * p.q_stride_head;
  const char* d_o = static_cast<const char*>(p.d_o) + batch * p.d_o_stride_batch + head * p.d_o_stride_head;
  const char* o = static_cast<const char*>(p.o) + 2 * (batch * p.o_stride_batch + head * p.o_stride_head);
  __shared__ float sums[kTileM];
  const int own_row = block * kTileM + threadIdx.x;  // whose LSE and D the thread writes
  float lse = -kInfinity;
  float dlse = 0.f;
  if (threadIdx.x < kTileM && own_row < p.q_len) {
    const long long at = (static_cast<long long>(batch) * p.heads_q + head) * p.q_len + own_row;
    lse = static_cast<const float*>(p.lse)[at];
    if (p.dlse != nullptr) dlse = static_cast<const float*>(p.dlse)[at];
  }
#pragma unroll
  for (int i = 0; i < kTileM / kGroups; ++i) {
    const int within = threadIdx.x / kChunks + i * kGroups;
    const int row = block * kTileM + within;
    uint4 query = make_uint4(0, 0, 0, 0);
    uint4 gradient = make_uint4(0, 0, 0, 0);
    float sum = 0.f;
    if (row < p.q_len && chunk * 16 < kHeadDimQk) query = load_once(q + row * p.q_stride_row + chunk * 16);
    if (row < p.q_len && chunk * 16 < kHeadDimV) {
      gradient = load_once(d_o + row * p.d_o_stride_row + chunk * 16);
      sum = dot_of_chunk(gradient, o + 2 * (row * p.o_stride_row + chunk * 16));
    }
    *reinterpret_cast<uint4*>(shared + place_of(within, chunk)) = query;
    *reinterpret_cast<uint4*>(shared + kBlockBytes + place_of(within, chunk)) = gradient;
#pragma unroll
    for (int distance = 1; distance < kChunks; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (chunk == 0) sums[within] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kTileM) {
    // Padding and rows that see no key get an LSE of +inf, and so weights of 0. The gradient of the LSE of such
    // rows, NaN where two of them were joined, must not reach a product.
    const bool seen = lse != -kInfinity;
    const float factor = limited(read_scale(p.descale_do, 0));
    // Weights are made of it times the scale that they are stored with.
    const float shift = log2_approx(scale_of_weights(p.scale_s, 0x1p8f));
    static_cast<float*>(p.lse_log2)[slot * kTileM + threadIdx.x] = lse_in_log2(lse) - shift;
    static_cast<float*>(p.d)[slot * kTileM + threadIdx.x] = sums[threadIdx.x] * factor - (seen ? dlse : 0.f);
  }
  // A warpgroup has queries, the other one output gradients.
  const u32 smem = shared_address(shared);
  constexpr u32 kDoImage = kSmemImage + ceil_div(kHeadDimQk, 64) * kBlockBytes;
  if (threadIdx.x < 128) {
    widen_tile<OperandElement, WideElement, kTileM, kHeadDimQk, 128, kBlockBytes, 1024, kBlockBytes, 2>(smem, smem + kSmemImage, threadIdx.x, kTileM);
  } else {
    widen_tile<GradientElement, WideElement, kTileM, kHeadDimV, 128, kBlockBytes, 1024, kBlockBytes, 2>(smem + kBlockBytes, smem + kDoImage, threadIdx.x - 128, kTileM);
  }
  __syncthreads();
  store_image<kTurnedBytes>(shared + kSmemImage, p.queries_turned, slot);
}
