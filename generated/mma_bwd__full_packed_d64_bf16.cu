// mma_bwd__full_packed_d64_bf16__ac9ab5
// Rendered by attngen from kernels/mma_sync/backward/backward.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/copy/cta_rows.cuh"
#include "attngen/mma/atoms.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/store.cuh"
#include "attngen/mma/sums.cuh"
#include "attngen/mma/warp_products.cuh"
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/gap_rows.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/packed_tiles.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/transposed.cuh"

namespace attngen {

// ---- the problem and the plan
constexpr int kHeadDimQk = 64;
constexpr int kHeadDimV = 64;
using Element = Bf16;
constexpr int kKeyWarps = 4;
constexpr int kQueryWarps = 1;
constexpr int kThreads = 128;
constexpr int kBlock = 64;  // queries
constexpr int kTileN = 128;
constexpr int kTileM = kBlock / kQueryWarps / 2;  // queries of a block whose scores a warp has at once
constexpr int kWarpKeys = kTileN / kKeyWarps;
constexpr int kRowTiles = kWarpKeys / 16;
constexpr int kQkSteps = ceil_div(kHeadDimQk, 16);
constexpr int kVSteps = ceil_div(kHeadDimV, 16);
// Warps that share the rows of dQ, each with some columns.
constexpr int kDqRowWarps = 2;
constexpr int kDqTiles = kBlock / 16 / kDqRowWarps;
constexpr int kRowBlock = 64;  // queries of a block of the workspaces
constexpr u32 kQueryBoxBytes = kBlock * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kQStageBytes = ceil_div(kHeadDimQk, 64) * kQueryBoxBytes;
constexpr u32 kDoStageBytes = ceil_div(kHeadDimV, 64) * kQueryBoxBytes;
constexpr u32 kRowBytes = kBlock * 4;  // one float a query
constexpr u32 kSmemK = 0;
constexpr u32 kSmemV = 16384;
constexpr u32 kSmemQ = 32768;
constexpr u32 kSmemDo = 49152;
constexpr u32 kSmemDs = 65536;
constexpr u32 kSmemRows = 81920;
using QkShare = ColumnShare<kQkSteps, kQueryWarps>;
using VShare = ColumnShare<kVSteps, kQueryWarps>;
using DqShare = ColumnShare<kQkSteps, kKeyWarps * kQueryWarps / kDqRowWarps>;

// ---- the fragments
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

struct RangeIteration {
  template <int kBlock, class MaskList>
  ATTNGEN_HD static BlockRange blocks(const MaskList& masks, const Context& ctx, int first_row,
                                      int last_row) {
    return kv_block_range<kBlock>(masks, ctx, first_row, last_row);
  }
};
// The masks of this kernel; a key is visible where all their ranges meet.
struct MaskList {
  static constexpr bool kBoundsLeft = false;
  static constexpr bool kBoundsRight = false;

  ATTNGEN_HD Range row_range(const Context& ctx, int i) const {
    Range range = {0, ctx.kv_len};
    return range;
  }
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const {
    Range range = {0, ctx.q_len};
    return range;
  }
};

using QSequence = PackedSequence;
using KvSequence = PackedSequence;
using KvIteration = RangeIteration;

struct Params {
  void* q;
  void* k;
  void* v;
  void* d_o;
  void* dk;
  void* dv;
  void* dq;
  void* lse_log2;
  void* d;
  void* dq_acc;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  long long v_stride_row;
  long long v_stride_head;
  long long v_stride_batch;
  long long d_o_stride_row;
  long long d_o_stride_head;
  long long d_o_stride_batch;
  long long dk_stride_row;
  long long dk_stride_head;
  long long dk_stride_batch;
  long long dv_stride_row;
  long long dv_stride_head;
  long long dv_stride_batch;
  long long dq_stride_row;
  long long dq_stride_head;
  long long dq_stride_batch;
  int kv_blocks;
  int q_blocks;
  int heads_q;
  int heads_kv;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  int sequences;
  float scale;
  float scale_log2;
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
static_assert(sizeof(Params) == 352, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {};
}

ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return PackedSequence{p.kv_len, p.kv_seqlens, p.kv_offsets, p.kv_longest}; }

ATTNGEN_DEVICE Context tile_context(const Params& p, int batch, int head) {
  const int q_len = q_sequence(p).length(batch);
  const int kv_len = kv_sequence(p).length(batch);
  return {batch, head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}

// Fills rows of gradients that belong to no sequence: one share of so many.
ATTNGEN_DEVICE void fill_gaps(const Params& p, int share, int shares, int lane) {
  if (p.dq && q_sequence(p).may_have_gaps(p.sequences)) {
    for_each_gap_row(q_sequence(p), p.sequences, share, shares, lane, [&](int batch, int row) {
      clear_row<128>(p.dq, 2 * (static_cast<long long>(row) * p.dq_stride_row), 2 * p.dq_stride_head, p.heads_q, lane);
    });
  }
  if (kv_sequence(p).may_have_gaps(p.sequences)) {
    for_each_gap_row(kv_sequence(p), p.sequences, share, shares, lane, [&](int batch, int row) {
      clear_row<128>(p.dk, 2 * (static_cast<long long>(row) * p.dk_stride_row), 2 * p.dk_stride_head, p.heads_kv, lane);
      clear_row<128>(p.dv, 2 * (static_cast<long long>(row) * p.dv_stride_row), 2 * p.dv_stride_head, p.heads_kv, lane);
    });
  }
}

// ---- rows that the CTA copies
ATTNGEN_DEVICE auto q_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.q, batch, head, q_sequence(p).first_token(batch), p.q_stride_batch, p.q_stride_head,
                   p.q_stride_row, rows);
}
ATTNGEN_DEVICE auto k_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.k, batch, head, kv_sequence(p).first_token(batch), p.k_stride_batch, p.k_stride_head,
                   p.k_stride_row, rows);
}
ATTNGEN_DEVICE auto v_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.v, batch, head, kv_sequence(p).first_token(batch), p.v_stride_batch, p.v_stride_head,
                   p.v_stride_row, rows);
}
ATTNGEN_DEVICE auto d_o_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.d_o, batch, head, q_sequence(p).first_token(batch), p.d_o_stride_batch, p.d_o_stride_head,
                   p.d_o_stride_row, rows);
}
// Where a block's rows begin in the workspaces: a number of blocks from their start.
ATTNGEN_DEVICE long long workspace_block(const Params& p, int batch, int head, int block) {
  return static_cast<long long>(head) * p.q_blocks + PackedTiles<kRowBlock, QSequence>::first_of(q_sequence(p).first_token(batch), batch) + block;
}

// ---- a warp, its keys and their gradients
struct Warp {
  const Params& p;
  int lane;
  int key;   // the thread's first, less 16 for each further tile of rows
  int part;  // of a block's queries
  // Where the lane reads keys, and P^T or dS^T as rows; queries of its part; rows of any operand as the reduction; and
  // where its first pair of P^T goes.
  u32 key_place, query_place, reduced_place, pair_place;
  u32 rows_place;  // the thread's first two of a block's LSE
  QkShare qk_share;
  VShare v_share;
  float dk[kRowTiles][QkShare::kMost * 8];
  float dv[kRowTiles][VShare::kMost * 8];

  using Scores = float[kTileM / 2];
  using Packed = u32[kTileM / 4];

  ATTNGEN_DEVICE Warp(const Params& p, u32 smem, int first, int warp) : p(p), lane(threadIdx.x % 32), part(warp % kQueryWarps), qk_share(part), v_share(part) {
    const int row = warp / kQueryWarps * kWarpKeys;
    key = first + row + lane / 4;
    key_place = lane_place(smem, row, 0, lane);
    query_place = lane_place_across(smem, part * kTileM, 0, lane);
    reduced_place = lane_place(smem, 0, 0, lane);
    rows_place = smem + kSmemRows + (part * kTileM + (lane & 3) * 2) * 4;
    pair_place = attngen::pair_place(smem, row, part * kTileM / 8, lane);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (float& x : dk[m]) x = 0.f;
#pragma unroll
      for (float& x : dv[m]) x = 0.f;
    }
  }

  // dP^T starts at -D, so that dS^T = P^T (dP^T - D) is one product.
  ATTNGEN_DEVICE void start_gradients(Scores& gradients, u32 rows) const {
#pragma unroll
    for (int i = 0; i < kTileM / 2; i += 4) {
      const float2 mean = load_shared_pair(rows + kRowBytes + i * 8);
      gradients[i] = gradients[i + 2] = -mean.x;
      gradients[i + 1] = gradients[i + 3] = -mean.y;
    }
  }
  // 16 keys: S^T becomes P^T.
  ATTNGEN_DEVICE void weigh(Scores& scores, u32 lse) const {
    weigh_queries<kTileM>(scores, p.scale_log2, lse);
  }
  // The tile `m` of 16 keys: S^T and dP^T become P^T and dS^T, the latter in shared memory at `place`. block: the number of
  // such parts before it.
  ATTNGEN_DEVICE void differentiate(Scores& scores, Scores& gradients, const Context& ctx, int m, int block, u32 rows, bool masked, u32 place, Packed& weights, Packed& packed) const {
    const int key = this->key + m * 16;
    if (masked) hide_queries<kTileM>(scores, mask_list(p), ctx, key, block * kTileM + (lane & 3) * 2);
    weigh(scores, rows);
    pack_pairs<Element, kTileM / 2>(weights, scores);
#pragma unroll
    for (int i = 0; i < kTileM / 2; i += 2) {
      gradients[i] *= scores[i];
      gradients[i + 1] *= scores[i + 1];
    }
    pack_pairs<Element, kTileM / 2>(packed, gradients);
    store_pairs(place, packed);
  }

  // The weights of a block, part by part: what they add to gradients of values, and dS^T to those of keys.
  ATTNGEN_DEVICE void add_block(const Context& ctx, int block, u32 stage, bool masked) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Packed weights[kRowTiles];
      Packed gradients[kRowTiles];
      make_weights(ctx, block * 2 + i, stage, masked, i, weights, gradients);
      const u32 rows = reduced_place + i * (kTileM * 128);
      multiply_held<Element, kTileM / 16, kQueryBoxBytes>(dv, weights, rows + kSmemDo + stage * kDoStageBytes, v_share);
      multiply_held<Element, kTileM / 16, kQueryBoxBytes>(dk, gradients, rows + kSmemQ + stage * kQStageBytes, qk_share);
    }
  }
  // P^T and dS^T, packed, of part i of the block; block: the number of such parts before it.
  ATTNGEN_DEVICE void make_weights(const Context& ctx, int block, u32 stage, bool masked, int i, Packed (&weights)[kRowTiles], Packed (&packed)[kRowTiles]) const {
    Scores scores[kRowTiles];
    Scores gradients[kRowTiles];
    const u32 rows = rows_place + stage * (2 * kRowBytes) + i * (kTileM * 4);
    const u32 queries = query_place + i * (kTileM * 128);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (float& x : scores[m]) x = 0.f;
      start_gradients(gradients[m], rows);
    }
    multiply_rows<Element, kQkSteps, kSmemK, kKeyBoxBytes, kQueryBoxBytes>(scores, key_place, queries + kSmemQ + stage * kQStageBytes);
    multiply_rows<Element, kVSteps, kSmemV, kKeyBoxBytes, kQueryBoxBytes>(gradients, key_place, queries + kSmemDo + stage * kDoStageBytes);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const u32 place = (pair_place ^ (i * kTileM * 2)) + m * (16 * 128) + kSmemDs;
      differentiate(scores[m], gradients[m], ctx, m, block, rows, masked, place, weights[m], packed[m]);
    }
  }
  // And to dQ of the block, in memory.
  ATTNGEN_DEVICE void add_queries(u32 smem, int warp, int block, int head, int batch) const {
    const DqShare share(warp / kDqRowWarps);
    const int tile = warp % kDqRowWarps * kDqTiles;
    float dq[kDqTiles][DqShare::kMost * 8] = {};
    multiply_columns<Element, kTileN / 16, kSmemDs, kKeyBoxBytes, true>(dq, lane_place_across(smem, 0, tile * 2, lane), share.begin<kKeyBoxBytes>(reduced_place) + kSmemK, share);
    float* sums = static_cast<float*>(p.dq_acc) + workspace_block(p, batch, head, block / (kRowBlock / kBlock)) * 4096 + ((block % (kRowBlock / kBlock) * (kBlock / 16) + tile) * 32 + lane) * 1;
#pragma unroll
    for (int m = 0; m < kDqTiles; ++m) {
#pragma unroll
      for (int n = 0; n < DqShare::kMost; ++n) {
        if (share.has(n)) add_planes<8>(sums + m * 32 + (share.first + n) * (8 * kSumThreads), dq[m] + n * 8);
      }
    }
  }

  ATTNGEN_DEVICE void store(const Context& ctx, int kv_head) const {
    const Context tile = {ctx.batch, kv_head};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = key + m * 16;
      {
        const int column = qk_share.first * 16;
        const float factor = p.scale;
        store_whole_rows<Element, 64>(static_cast<char*>(p.dk) + 2 * (static_cast<long long>(tile.batch) * p.dk_stride_batch + static_cast<long long>(tile.head) * p.dk_stride_head + (static_cast<long long>(row) + kv_sequence(p).first_token(tile.batch)) * p.dk_stride_row + column),
               2 * p.dk_stride_row, ctx.kv_len - (row), this->dk[m], factor, factor, lane);
      }
      {
        const int column = v_share.first * 16;
        const float factor = 1.f;
        store_whole_rows<Element, 64>(static_cast<char*>(p.dv) + 2 * (static_cast<long long>(tile.batch) * p.dv_stride_batch + static_cast<long long>(tile.head) * p.dv_stride_head + (static_cast<long long>(row) + kv_sequence(p).first_token(tile.batch)) * p.dv_stride_row + column),
               2 * p.dv_stride_row, ctx.kv_len - (row), this->dv[m], factor, factor, lane);
      }
    }
  }
};

// A block of queries of one head, which a tile visits.
struct Visit {
  int head;
  int block;

  ATTNGEN_DEVICE void advance(const BlockRange& blocks) {
    if (++block < blocks.end) return;
    block = blocks.begin;
    ++head;
  }
};
// A tile of keys of one key head, from copies to gradients.
ATTNGEN_DEVICE void run_tile(const Params& p, u32 smem, const TileCoord& tile) {
  Context ctx = tile_context(p, tile.batch, tile.head * p.group_size);
  const int first = tile.row_block * kTileN;
  if (first >= ctx.kv_len) return;
  const int warp_number = threadIdx.x / 32;
  BlockRange blocks = q_block_range<kBlock>(mask_list(p), ctx, first, min_of(first + kTileN, ctx.kv_len) - 1);
  if (first + kTileN > ctx.kv_len) blocks.full_end = blocks.full_begin;
  Warp warp(p, smem, first, warp_number);
  const auto copy_block = [&](const Visit& visit, u32 stage) {
    copy_rows<kThreads, kHeadDimQk, kBlock>(smem + kSmemQ + stage * kQStageBytes, q_rows(p, ctx.batch, visit.head, ctx.q_len), visit.block * kBlock);
    copy_rows<kThreads, kHeadDimV, kBlock>(smem + kSmemDo + stage * kDoStageBytes, d_o_rows(p, ctx.batch, visit.head, ctx.q_len), visit.block * kBlock);
    if (threadIdx.x < kBlock / 2) {  // 16 bytes each of LSE, then of D
      const long long row = workspace_block(p, ctx.batch, visit.head, visit.block / (kRowBlock / kBlock)) * kRowBlock + visit.block % (kRowBlock / kBlock) * kBlock;
      const bool of_d = threadIdx.x >= kBlock / 4;
      const float* source = static_cast<const float*>(of_d ? p.d : p.lse_log2) + row + threadIdx.x % (kBlock / 4) * 4;
      copy_async<16>(smem + kSmemRows + stage * (2 * kRowBytes) + threadIdx.x * 16, source, true);
    }
  };
  Visit next = {ctx.head, blocks.begin};
  int left = (blocks.end - blocks.begin) * p.group_size;
  if (left > 0) {
    copy_rows<kThreads, kHeadDimQk, kTileN>(smem + kSmemK, k_rows(p, ctx.batch, tile.head, ctx.kv_len), first);
    copy_rows<kThreads, kHeadDimV, kTileN>(smem + kSmemV, v_rows(p, ctx.batch, tile.head, ctx.kv_len), first);
    copy_block(next, 0);
  }
  u32 stage = 0;
  const auto add_queries = [&](const Visit& visit) {
    warp.add_queries(smem, warp_number, visit.block, visit.head, ctx.batch);
  };
#pragma unroll 1
  for (; left > 0; --left) {
    await_copies();
    __syncthreads();  // the block is there, and nobody reads that before any more
    const Visit visit = next;
    next.advance(blocks);
    if (left > 1) copy_block(next, stage ^ 1);
    ctx.head = visit.head;
    warp.add_block(ctx, visit.block, stage, visit.block < blocks.full_begin || visit.block >= blocks.full_end);
    __syncthreads();  // all warps' weights are there
    add_queries(visit);
    stage ^= 1;
  }
  warp.store(ctx, tile.head);
}

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(128, 2)
mma_bwd__full_packed_d64_bf16__ac9ab5(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  if (threadIdx.x < 32) fill_gaps(p, blockIdx.x, gridDim.x, threadIdx.x);
  const int index = blockIdx.x;
  const TileOrder order = {p.kv_blocks, p.heads_kv, p.total_heads, p.heads_per_group, p.tail_rows};
  TileCoord tile = order.at<false>(index);
  const PackedTiles<kTileN, KvSequence> tiles = {kv_sequence(p), p.sequences};
  tile.batch = tiles.sequence_of(tile.row_block);
  tile.row_block -= tiles.first(tile.batch);
  if (tile.row_block < 0) return;
  run_tile(p, shared_address(shared), tile);
}
