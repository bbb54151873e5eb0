// kv_append__full_d128_e4m3__e64d20
// Rendered by attngen from kernels/support/append.cu.j2; do not edit.
#include "attngen/append/place.cuh"
#include "attngen/append/rows.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kWarps = 2;
constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kBytes = 1;  // of an element of new tokens
constexpr int kStoredBytes = 1;
constexpr bool kAtOnce = kStoredBytes < kBytes;
using Element = E4m3;
using Stored = E4m3;

struct Params {
  void* k;
  void* v;
  void* k_cache;
  void* v_cache;
  void* lengths;
  void* cu_seqlens;
  void* cu_seqlens_all;
  void* page_table;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  long long v_stride_row;
  long long v_stride_head;
  long long v_stride_batch;
  long long k_cache_stride_row;
  long long k_cache_stride_head;
  long long k_cache_stride_batch;
  long long v_cache_stride_row;
  long long v_cache_stride_head;
  long long v_cache_stride_batch;
  long long total_rows;
  long long table_stride;
  int q_len;
  int sequences;
  int heads_kv;
  int packed;
  int page_size;
  int pages;
  int table_columns;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 208, "packed by the host");

ATTNGEN_DEVICE char* at(void* tensor, long long elements, int bytes) { return static_cast<char*>(tensor) + bytes * elements; }

}  // namespace attngen

// Grid: tokens, of all sequences.
extern "C" __global__ void __launch_bounds__(64)
kv_append__full_d128_e4m3__e64d20(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  const int lane = threadIdx.x % 32;
  const int token = blockIdx.x * kWarps + threadIdx.x / 32;
  if (token >= p.total_rows) return;
  // Where tokens are packed, their rows are those of one batch.
  const long long batch = p.packed ? 0 : token / p.q_len;
  const long long row = p.packed ? token : token % p.q_len;
  const char* key_rows = at(p.k, batch * p.k_stride_batch + row * p.k_stride_row, kBytes);
  const char* value_rows = at(p.v, batch * p.v_stride_batch + row * p.v_stride_row, kBytes);
  const auto* ends = static_cast<const int*>(p.cu_seqlens);
  const Token place = p.packed ? packed_token(ends, p.sequences, token, lane) : dense_token(ends, token, p.q_len);
  if (!place.there) return;
  const int before = length_before(static_cast<const int*>(p.lengths), static_cast<const int*>(p.cu_seqlens_all), place);
  const int position = before + place.row;
  const Slot slot = slot_of(static_cast<const int*>(p.page_table), p.table_stride, p.table_columns, p.page_size, p.pages, place.sequence, position);
  if (!slot.there) return;
  const Rows keys = {key_rows, kBytes * p.k_stride_head,
                     at(p.k_cache, slot.page * p.k_cache_stride_batch + slot.row * p.k_cache_stride_row, kStoredBytes),
                     kStoredBytes * p.k_cache_stride_head, p.heads_kv};
  copy_rows<kBytes * kHeadDim>(keys, lane);
  const Rows values = {value_rows, kBytes * p.v_stride_head,
                     at(p.v_cache, slot.page * p.v_cache_stride_batch + slot.row * p.v_cache_stride_row, kStoredBytes),
                     kStoredBytes * p.v_cache_stride_head, p.heads_kv};
  copy_rows<kBytes * kHeadDimV>(values, lane);
}
