// bwd_fp8_convert__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__bb9287
// Rendered by attngen from kernels/wgmma/backward/fp8_convert.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale_gradients.cuh"
#include "attngen/scheduler/grid_place.cuh"
#include "attngen/scheduler/packed_tiles.cuh"

namespace attngen {

constexpr int kHeadDimQk = 64;
constexpr int kTileM = 64;
constexpr int kParts = 2;
constexpr int kColumns = 32;  // of a part
constexpr int kPartFloats = 64 * kColumns;
constexpr int kRows = 64;  // of a part
constexpr int kThreads = 128;
constexpr int kBytes = 2;  // of an element
// Padded so that what a warp writes at once falls on different banks.
constexpr int kPitch = kColumns * kBytes + 16;
using Gradient = Bf16;

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
static_assert(sizeof(Params) == 112, "packed by the host");

}  // namespace attngen

// Grid: parts of blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(128)
bwd_fp8_convert__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__bb9287(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  __shared__ __align__(16) unsigned char rows[kRows * kPitch];
  const int ctas = p.q_blocks * kParts;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int place = index / kParts;
  const long long slot = static_cast<long long>(head) * p.q_blocks + place;  // in the workspaces
  const PackedSequence sequence = PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest};
  const PackedTiles<kTileM, PackedSequence> blocks = {sequence, p.sequences};
  const int batch = blocks.sequence_of(place);
  const int block = place - blocks.first(batch);
  const int part = index % kParts;
  const int q_len = sequence.length(batch);
  const int first_token = sequence.first_token(batch);
  if (block < 0) return;  // before the first sequence
  if (block * kTileM >= q_len) return;
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
    if (row < q_len && column < kHeadDimQk) {
      *reinterpret_cast<uint4*>(dq + kBytes * ((first_token + row) * p.dq_stride_row + column)) = *reinterpret_cast<const uint4*>(rows + within * kPitch + i % kChunks * 16);
    }
  }
}
