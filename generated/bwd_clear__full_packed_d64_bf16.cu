// bwd_clear__full_packed_d64_bf16__e7b94d
// Rendered by attngen from kernels/support/prepare.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/softmax/row.cuh"
#include "attngen/scheduler/grid_place.cuh"
#include "attngen/scheduler/packed_tiles.cuh"

namespace attngen {

constexpr int kHeadDimV = 64;
constexpr int kTileM = 64;
constexpr int kLanes = 8;  // threads a row
constexpr int kThreads = 256;
constexpr int kGroups = kThreads / kLanes;
constexpr int kRows = ceil_div(kTileM, kGroups);  // of a group
static_assert(kTileM <= kThreads);
constexpr int kChunks = kHeadDimV / 8;  // of 16 bytes
constexpr int kSteps = ceil_div(kChunks, kLanes);
using Element = Bf16;

struct PackedSequence {
  int len;
  const void* seqlens;
  const void* offsets;
  int longest;

  // Where the tensors say that the sequence lies, which may be anywhere.
  ATTNGEN_HD Span claim(int batch) const {
    const int* ends = static_cast<const int*>(seqlens) + batch;
    return {static_cast<const int*>(offsets)[batch], difference(ends[1], ends[0])};
  }
  // Whether that is inside the tensor; a sequence that is not has no tokens.
  ATTNGEN_HD bool lies(int batch) const { return lies_within(claim(batch), len, longest); }
  ATTNGEN_HD Span span(int batch) const { return span_within(claim(batch), len, longest); }
  ATTNGEN_HD int length(int batch) const { return span(batch).length; }
  // Where a tensor map that ends where the sequence does has position 0.
  ATTNGEN_HD int first_row(int batch) const { return kLongest - length(batch); }
  ATTNGEN_HD SequenceIndex batch_index(int batch) const {
    const Span found = span(batch);
    return {found.length, found.start};
  }
  // Of one that was found before.
  ATTNGEN_HD int length(SequenceIndex index) const { return index.length; }
  ATTNGEN_HD int first_row(SequenceIndex index) const { return kLongest - index.length; }
  ATTNGEN_HD int first_token(SequenceIndex index) const { return index.start; }
  // Row of the tensor that holds position 0.
  ATTNGEN_HD int first_token(int batch) const { return span(batch).start; }
  // Rows behind the sequence that belong to none, up to the next one that lies in the tensor; before
  // the first sequence, -1, too. None behind one that does not.
  ATTNGEN_HD Range gap(int batch, int sequences) const {
    if (batch >= 0 && !lies(batch)) return {0, 0};
    const Span own = batch < 0 ? Span{0, 0} : span(batch);
    return {own.start + own.length, gap_end(batch, sequences)};
  }
  // Where the next sequence begins that lies in the tensor, else where this ends.
  ATTNGEN_HD int gap_end(int batch, int sequences) const {
    do {
      if (++batch >= sequences) return len;
    } while (!lies(batch));
    return static_cast<const int*>(offsets)[batch];
  }
  // Whether there may be rows that belong to none: unless the first sequence begins where the tensor
  // does, the last one ends where it does, and both lie in it. What that takes is read at once.
  ATTNGEN_HD bool may_have_gaps(int sequences) const {
    const int* ends = static_cast<const int*>(seqlens);
    const int first[] = {ends[0], ends[1]};
    const int last[] = {ends[sequences - 1], ends[sequences]};
    const u32 most = min_of(len, longest);
    return offsets != seqlens || first[0] != 0 || last[1] != len || static_cast<u32>(first[1]) > most ||
           static_cast<u32>(difference(len, last[0])) > most;
  }
  // Place of the tensor's row among floats [heads, len].
  ATTNGEN_HD long long place(int, int row, int head, int) const {
    return static_cast<long long>(head) * len + row;
  }
};

struct Params {
  void* o;
  void* d_o;
  void* lse;
  void* dlse;
  void* lse_log2;
  void* d;
  void* dq_acc;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long d_o_stride_row;
  long long d_o_stride_head;
  long long d_o_stride_batch;
  int q_len;
  void* q_seqlens;
  void* q_offsets;
  int q_longest;
  int sequences;
  int heads_q;
  int q_blocks;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 144, "packed by the host");

}  // namespace attngen

// Grid: blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(256, 4)
bwd_clear__full_packed_d64_bf16__e7b94d(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  const int ctas = p.q_blocks;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int place = index;
  const long long slot = static_cast<long long>(head) * p.q_blocks + place;  // in the workspaces
  const PackedSequence sequence = PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest};
  const PackedTiles<kTileM, PackedSequence> blocks = {sequence, p.sequences};
  const int batch = blocks.sequence_of(place);
  const int block = place - blocks.first(batch);
  const int q_len = sequence.length(batch);
  const int first_token = sequence.first_token(batch);
  if (block < 0) return;  // before the first sequence
  if (block * kTileM >= q_len) return;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const char* o = static_cast<const char*>(p.o) + 2 * (batch * p.o_stride_batch + head * p.o_stride_head);
  const char* d_o = static_cast<const char*>(p.d_o) + 2 * (batch * p.d_o_stride_batch + head * p.d_o_stride_head);
  __shared__ float sums[kTileM];
  // All that a thread reads is on its way before its first sum.
  const int own_row = block * kTileM + threadIdx.x;  // whose LSE and D the thread writes
  float lse = -kInfinity;
  float dlse = 0.f;
  if (threadIdx.x < kTileM && own_row < q_len) {
    const long long at = sequence.place(batch, first_token + own_row, head, p.heads_q);
    lse = static_cast<const float*>(p.lse)[at];
    if (p.dlse != nullptr) dlse = static_cast<const float*>(p.dlse)[at];
  }
  auto* sums_of_dq = static_cast<float4*>(p.dq_acc) + slot * 1024;
#pragma unroll 4
  for (int i = threadIdx.x; i < 1024; i += kThreads) sums_of_dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  uint4 a[kRows][kSteps];
  uint4 b[kRows][kSteps];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int within = group + i * kGroups;
    const int row = block * kTileM + within;
    const bool read = within < kTileM && row < q_len;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int chunk = lane + k * kLanes;
      a[i][k] = b[i][k] = make_uint4(0, 0, 0, 0);
      if (read && chunk < kChunks) {
        a[i][k] = load_once(o + 2 * ((first_token + row) * p.o_stride_row) + chunk * 16);
        b[i][k] = load_once(d_o + 2 * ((first_token + row) * p.d_o_stride_row) + chunk * 16);
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
    static_cast<float*>(p.lse_log2)[slot * kTileM + threadIdx.x] = lse_in_log2(lse);
    // Under dropout gradients of scores are relative to 1 / (1 - p).
    static_cast<float*>(p.d)[slot * kTileM + threadIdx.x] = sum;
  }
}
