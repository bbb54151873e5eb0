// varlen_prepare__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__1028c6
// Rendered by attngen from kernels/support/order.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/sequence_order.cuh"

namespace attngen {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == kLengthClasses && kWarps == 32, "a thread a class, a lane a warp");

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
  void* kv_schedule;
  int sequences;
  int heads_q;
  int heads_kv;
  int group_size;
  int kept;
  int q_len;
  void* q_seqlens;
  void* q_offsets;
  int q_longest;
  int kv_len;
  void* kv_seqlens;
  void* kv_offsets;
  int kv_longest;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 80, "packed by the host");

using QSequence = PackedSequence;
using KvSequence = PackedSequence;
ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return PackedSequence{p.kv_len, p.kv_seqlens, p.kv_offsets, p.kv_longest}; }

// Sum of x over the CTA's threads up to this one, kMostTiles at most. `sums`: an int a warp.
ATTNGEN_DEVICE int sum_up_to(int x, int* sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x = add_tiles(x, before);
  }
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  int before = lane < warp ? sums[lane] : 0;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) before = add_tiles(before, __shfl_xor_sync(~0u, before, distance));
  __syncthreads();
  return add_tiles(x, before);
}

// Writes the order of the sequences: the time of a tile grows with the length of the other axis.
template <int kRows, int kTailShare, class Own, class Other, class Group>
ATTNGEN_DEVICE void write_schedule(ScheduledSequence* schedule, Own own, Other other, int sequences, int heads, Group group) {
  __shared__ int places[kLengthClasses];
  __shared__ int order[kThreads];
  __shared__ int sums[kWarps];
  const int thread = threadIdx.x;
  const auto class_of = [&](int batch) { return kLengthClasses - 1 - length_class(other.length(batch)); };
  places[thread] = 0;
  __syncthreads();
  for (int batch = thread; batch < sequences; batch += kThreads) atomicAdd(&places[class_of(batch)], 1);
  __syncthreads();
  const int count = places[thread];
  places[thread] = sum_up_to(count, sums) - count;
  __syncthreads();
  // In shared memory where they fit.
  for (int batch = thread; batch < sequences; batch += kThreads) {
    const int place = atomicAdd(&places[class_of(batch)], 1);
    if (sequences > kThreads) schedule[1 + place].batch = batch;
    else order[place] = batch;
  }
  __syncthreads();
  int total = 0;
#pragma unroll 1
  for (int tail = 0; tail < (kTailShare > 0 ? 2 : 1); ++tail) {
#pragma unroll 1
    for (int first = 0; first < sequences; first += kThreads) {
      const int place = first + thread;
      const int batch = place >= sequences ? -1 : sequences > kThreads ? schedule[1 + place].batch : order[place];
      const int tiles = batch < 0 ? 0 : ceil_div(own.length(batch), kRows);
      const int kept = kept_tiles<kTailShare>(tiles);
      const int end = add_tiles(total, sum_up_to((tail ? kept : tiles - kept) * heads, sums));
      if (batch >= 0) schedule[1 + tail * sequences + place] = {batch, end, tiles, tail ? 0 : group(batch)};
      if (thread == kThreads - 1) sums[0] = end;
      __syncthreads();
      total = sums[0];
      __syncthreads();
    }
  }
  if (thread == 0) schedule[0] = {kOrdered, total, 0, 0};
}

// Whether another call has left the order of the same lengths.
ATTNGEN_DEVICE bool is_ordered(const Params& p, const void* schedule) {
  return p.kept && static_cast<const ScheduledSequence*>(schedule)->batch == kOrdered;
}

ATTNGEN_DEVICE int key_heads_together(const Params& p, int length) {
  const int fitting = 524288 / p.group_size / max_of(length, 1);
  return max_of(min_of(min_of(fitting, 8), p.heads_kv), 1);
}

ATTNGEN_DEVICE void schedule_keys(const Params& p) {
  const QSequence queries = q_sequence(p);
  write_schedule<128, 0>(static_cast<ScheduledSequence*>(p.kv_schedule), kv_sequence(p), queries, p.sequences, p.heads_kv,
                 [&](int batch) { return key_heads_together(p, queries.length(batch)); });
}

}  // namespace attngen

// Grid: one CTA.
extern "C" __global__ void __launch_bounds__(1024)
varlen_prepare__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__1028c6(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  if (!is_ordered(p, p.kv_schedule)) schedule_keys(p);
}
