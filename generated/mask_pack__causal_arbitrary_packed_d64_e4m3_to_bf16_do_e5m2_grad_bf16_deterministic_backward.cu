// mask_pack__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__03acaf
// Rendered by attngen from kernels/support/mask_pack.cu.j2; do not edit.
#include "attngen/mask_bits.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kWarps = 16;
// Queries and keys that a warp packs at a time. Rows of bits reach 128 beyond the last, rounded up to as many.
constexpr int kQueries = 32;
constexpr int kKeys = 128;
constexpr int kSteps = 8;  // of 4 queries, in which a lane has 16 keys of one

struct Params {
  void* attn_mask;
  long long attn_mask_stride_batch;
  long long attn_mask_stride_head;
  long long attn_mask_stride_row;
  long long attn_mask_stride_column;
  void* mask_columns;
  long long mask_columns_stride_batch;
  long long mask_columns_stride_head;
  long long mask_columns_stride_row;
  int attn_mask_batches;
  int attn_mask_heads;
  int attn_mask_queries;
  int attn_mask_keys;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 88, "packed by the host");

// The bits of a lane's keys from `key` of its queries, `query` and 4 further on each: 0 behind the
// last. `whole`: rows are 16-byte aligned, their keys side by side.
ATTNGEN_DEVICE void gather(u32 (&bits)[kSteps], const Params& p, const unsigned char* mask, int query, int key, bool whole) {
  mask += query * p.attn_mask_stride_row + key * p.attn_mask_stride_column;
  const long long step = 4 * p.attn_mask_stride_row;
  if (whole) {
    uint4 bytes[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      bytes[i] = make_uint4(0, 0, 0, 0);
      if (query + 4 * i < p.attn_mask_queries) bytes[i] = *reinterpret_cast<const uint4*>(mask + i * step);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) bits[i] = mask_bits_of(bytes[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    bits[i] = 0;
    const int keys = query + 4 * i < p.attn_mask_queries ? min_of(p.attn_mask_keys - key, 16) : 0;
#pragma unroll 1
    for (int k = 0; k < keys; ++k) {
      bits[i] |= static_cast<u32>(mask[i * step + k * p.attn_mask_stride_column] != 0) << k;
    }
  }
}

// A warp's queries from `query` and keys from `key` of one sequence and head.
ATTNGEN_DEVICE void pack(const Params& p, unsigned short* tile, int batch, int head, int query, int key, bool whole, int lane) {
  const unsigned char* mask = static_cast<const unsigned char*>(p.attn_mask) + batch * p.attn_mask_stride_batch + head * p.attn_mask_stride_head;
  u32 bits[kSteps];
  gather(bits, p, mask, query + lane / 8, key + lane % 8 * 16, whole && key + kKeys <= p.attn_mask_keys);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) tile[(i * 4 + lane / 8) * 8 + lane % 8] = bits[i];
  __syncwarp();
  u32* columns = static_cast<u32*>(p.mask_columns) + batch * p.mask_columns_stride_batch + head * p.mask_columns_stride_head;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    // A word of a lane's query becomes one of a lane's key.
    const u32 word = transpose_bits(reinterpret_cast<const u32*>(tile)[lane * 4 + i], lane);
    const int own = key + 32 * i + lane;
    if (own < (p.mask_columns_stride_row ? p.attn_mask_keys : 1)) columns[own * p.mask_columns_stride_row + query / 32] = word;
  }
  __syncwarp();  // all have read the tile
}

}  // namespace attngen

// Grid: one CTA an SM.
extern "C" __global__ void __launch_bounds__(512, 1)
mask_pack__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__03acaf(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ __align__(16) unsigned short tiles[kWarps][kQueries * 8];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const long long strides = p.attn_mask_stride_batch | p.attn_mask_stride_head | p.attn_mask_stride_row;
  const bool whole = p.attn_mask_stride_column == 1 && ((strides | reinterpret_cast<long long>(p.attn_mask)) & 15) == 0;
  const int q_blocks = (ceil_div(p.attn_mask_queries, 128) + 1) * (128 / kQueries);
  const int kv_blocks = p.mask_columns_stride_row ? ceil_div(p.attn_mask_keys, kKeys) : 1;
  const long long blocks = static_cast<long long>(q_blocks) * kv_blocks;
  const long long all = blocks * p.attn_mask_batches * p.attn_mask_heads;
  for (long long at = blockIdx.x * kWarps + warp; at < all; at += gridDim.x * kWarps) {
    const int slice = static_cast<int>(at / blocks);
    const long long block = at - slice * blocks;
    // Queries after each other, whose words of a key lie side by side.
    const int column = static_cast<int>(block / q_blocks);
    const int row = static_cast<int>(block - static_cast<long long>(column) * q_blocks);
    pack(p, tiles[warp], slice / p.attn_mask_heads, slice % p.attn_mask_heads, row * kQueries, column * kKeys, whole, lane);
  }
}
