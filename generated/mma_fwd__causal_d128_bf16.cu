// mma_fwd__causal_d128_bf16__4cc5b1
// Rendered by attngen from kernels/mma_sync/forward/forward.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/copy/cta_rows.cuh"
#include "attngen/mma/atoms.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/store.cuh"
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/online.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

// ---- the problem and the plan
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
using Element = Bf16;
constexpr int kWarps = 4;
constexpr int kThreads = 128;
constexpr int kRowTiles = 2;  // of 16 rows, a warp's: each fragment of keys serves them all
constexpr int kWarpRows = kRowTiles * 16;
constexpr int kTileM = kWarps * kWarpRows;
constexpr int kTileN = 32;
// Whether blocks in which no key is hidden have code of their own.
constexpr bool kTellsFullBlocks = true;
constexpr float kLazyRescaleLog2 = 8;
constexpr bool kLongestFirst = true;
constexpr int kQkSteps = ceil_div(kHeadDimQk, 16);
constexpr int kVSteps = ceil_div(kHeadDimV, 16);
constexpr u32 kRowBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kKStageBytes = ceil_div(kHeadDimQk, 64) * kKeyBoxBytes;
constexpr u32 kVStageBytes = ceil_div(kHeadDimV, 64) * kKeyBoxBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 32768;
constexpr u32 kSmemV = 40960;

// ---- the fragments
struct CausalMask {
  // Keys that query i sees.
  ATTNGEN_HD Range row_range(const Context& ctx, int i) const { return {0, i + ctx.delta + 1}; }
  // Queries that see key j.
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const { return {j - ctx.delta, ctx.q_len}; }
};
struct VanillaSoftmax {
  // Factor that normalises the row's output, and its log-sum-exp (natural log), from the row's
  // largest scaled score and the sum of its weights relative to that one's.
  ATTNGEN_HD SoftmaxRow finalize(const Context&, float largest, float sum) const {
    if (sum == 0.f) return {0.f, -kInfinity};
    return {1.f / sum, largest + log2_of(sum) * kLn2};
  }
};
struct DenseSequence {
  int len;

  ATTNGEN_HD int length(int) const { return len; }
  // Row of the tensor that holds position 0, and the tensor's batch index.
  ATTNGEN_HD int first_row(int) const { return 0; }
  ATTNGEN_HD int batch_index(int batch) const { return batch; }
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
  CausalMask causal;
  static constexpr bool kBoundsLeft = false;
  static constexpr bool kBoundsRight = true;

  ATTNGEN_HD Range row_range(const Context& ctx, int i) const {
    Range range = {0, ctx.kv_len};
    range = intersect(range, causal.row_range(ctx, i));
    return range;
  }
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const {
    Range range = {0, ctx.q_len};
    range = intersect(range, causal.col_range(ctx, j));
    return range;
  }
};

using QSequence = DenseSequence;
using KvSequence = DenseSequence;
using KvIteration = RangeIteration;
using Softmax = VanillaSoftmax;

struct Params {
  void* q;
  void* k;
  void* v;
  void* o;
  void* lse;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  long long v_stride_row;
  long long v_stride_head;
  long long v_stride_batch;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  int tiles_m;
  int heads_q;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  float scale_log2;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 176, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}

ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return DenseSequence{p.q_len}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return DenseSequence{p.kv_len}; }

// ---- rows that the CTA copies
ATTNGEN_DEVICE auto q_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.q, batch, head, 0, p.q_stride_batch, p.q_stride_head,
                   p.q_stride_row, rows);
}
ATTNGEN_DEVICE auto k_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.k, batch, head, 0, p.k_stride_batch, p.k_stride_head,
                   p.k_stride_row, rows);
}
ATTNGEN_DEVICE auto v_rows(const Params& p, int batch, int head, int rows) {
  return head_rows(p.v, batch, head, 0, p.v_stride_batch, p.v_stride_head,
                   p.v_stride_row, rows);
}

// ---- a warp, its rows and their output
struct Warp {
  const Params& p;
  int lane;
  int first;  // its first row
  u32 q_place, k_place, v_place;  // of the lane, in a tile
  float output[kRowTiles][kHeadDimV / 2];
  RowState state[kRowTiles];

  ATTNGEN_DEVICE Warp(const Params& p, u32 smem, const Context& ctx, int tile_row) : p(p), lane(threadIdx.x % 32) {
    const int row = threadIdx.x / 32 * kWarpRows;
    first = tile_row + row;
    q_place = smem + kSmemQ + (row + (lane & 15)) * 128 + (((lane >> 4) ^ lane) & 7) * 16;
    k_place = smem + kSmemK + ((lane & 7) + (lane >> 4) * 8) * 128 + (((lane >> 3 & 1) ^ lane) & 7) * 16;
    v_place = smem + kSmemV + (lane & 15) * 128 + (((lane >> 4) ^ lane) & 7) * 16;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      state[m] = {{-kInfinity, -kInfinity}, {0.f, 0.f}, kLazyRescaleLog2};
#pragma unroll
      for (float& x : output[m]) x = 0.f;
    }
  }

  ATTNGEN_DEVICE void multiply_keys(float (&scores)[kRowTiles][kTileN / 2], u32 stage) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (float& x : scores[m]) x = 0.f;
    }
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(a[m], (q_place ^ (step % 4 * 32)) + step / 4 * kRowBoxBytes + m * (16 * 128));
      }
#pragma unroll
      for (int n = 0; n < kTileN / 16; ++n) {
        u32 b[4];
        load_matrices(b, ((k_place + stage * kKStageBytes) ^ (step % 4 * 32)) + step / 4 * kKeyBoxBytes + n * (16 * 128));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_add<Element>(scores[m] + n * 8, a[m], b[0], b[1]);
          multiply_add<Element>(scores[m] + n * 8 + 4, a[m], b[2], b[3]);
        }
      }
    }
  }
  // Adds what the weights a of keys 16 k and on give of each value.
  ATTNGEN_DEVICE void multiply_values(const u32 (&a)[kRowTiles][4], int k, u32 stage) {
#pragma unroll
    for (int n = 0; n < kVSteps; ++n) {
      u32 b[4];
      load_matrices_transposed(b, ((v_place + stage * kVStageBytes) ^ (n % 4 * 32)) + n / 4 * kKeyBoxBytes + k * (16 * 128));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_add<Element>(output[m] + n * 8, a[m], b[0], b[1]);
        if (n * 16 + 8 < kHeadDimV) multiply_add<Element>(output[m] + n * 8 + 4, a[m], b[2], b[3]);
      }
    }
  }

  // Turns scores into what the softmax takes: score fragments applied, invisible keys at -inf.
  template <bool kMasked>
  ATTNGEN_DEVICE void prepare_scores(float (&scores)[kTileN / 2], const Context& ctx, int row, int block) const {
    const int column = block * kTileN + (lane & 3) * 2;
    if constexpr (kMasked) {
      const MaskList masks = mask_list(p);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range range = masks.row_range(ctx, row + half * 8);
        const int lo = MaskList::kBoundsLeft ? range.lo - column : 0;
        hide_outside<kTileN>(scores, half, lo, range.hi - column);
      }
    }
  }

  // Raises the rows' maxima where some have outgrown them, and with these what was summed before.
  ATTNGEN_DEVICE void raise(BlockSoftmax<kTileN, false> (&soft)[kRowTiles], float (&scores)[kRowTiles][kTileN / 2]) {
    bool grew = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      soft[m].scale_log2 = p.scale_log2;
      soft[m].shift = 0.f;
      soft[m].find_maxima(scores[m]);
      grew |= soft[m].outgrow(state[m]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float rescale[2];
      soft[m].raise(state[m], 0, grew, rescale);
      soft[m].raise(state[m], 1, grew, rescale);
      if (grew) {
        soft[m].settle_raised(scores[m], state[m], kLazyRescaleLog2);
        state[m].row_sum[0] *= rescale[0];
        state[m].row_sum[1] *= rescale[1];
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) output[m][i] *= rescale[fragment_row(i)];
      }
    }
  }

  // A block of keys, from scores to output. between(): called by all warps of the CTA once keys have been read.
  template <bool kMasked, class Between>
  ATTNGEN_DEVICE void step(const Context& ctx, int block, u32 stage, Between between) {
    float scores[kRowTiles][kTileN / 2];
    multiply_keys(scores, stage);
    between();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) prepare_scores<kMasked>(scores[m], ctx, first + m * 16 + lane / 4, block);
    BlockSoftmax<kTileN, false> soft[kRowTiles];
    raise(soft, scores);
    // Written down between the products, which the exponentials run beside.
#pragma unroll
    for (int k = 0; k < kTileN / 16; ++k) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = k * 8; i < k * 8 + 8; ++i) {
          float& x = scores[m][i];
          x = exp2_approx(x * soft[m].scale_log2 - soft[m].offset[fragment_row(i)]);
          state[m].row_sum[fragment_row(i)] += x;
        }
        pack_pairs<Element, 8>(a[m], scores[m] + k * 8);
      }
      multiply_values(a, k, stage);
    }
  }

  // LSE, maxima, and the output.
  ATTNGEN_DEVICE void finish(const Context& ctx) const {
    const Softmax softmax = VanillaSoftmax{};
    float* lse = static_cast<float*>(p.lse) + (static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * ctx.q_len;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = first + m * 16 + lane / 4;
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = state[m].row_max[half] * kLn2 * p.scale_log2;
        const SoftmaxRow done = softmax.finalize(ctx, most, quad_sum(state[m].row_sum[half]));
        factor[half] = done.normalizer;
        const int i = row + half * 8;
        if ((lane & 3) == 0 && i < ctx.q_len) lse[i] = done.lse;
      }
      store_whole_rows<Element, kHeadDimV>(static_cast<char*>(p.o) + 2 * (static_cast<long long>(ctx.batch) * p.o_stride_batch + static_cast<long long>(ctx.head) * p.o_stride_head + (static_cast<long long>(row)) * p.o_stride_row),
               2 * p.o_stride_row, ctx.q_len - (row), this->output[m], factor[0], factor[1], lane);
    }
  }
};

// A tile of queries of one head, from copies to output.
ATTNGEN_DEVICE void run_tile(const Params& p, u32 smem, const TileCoord& tile) {
  const int q_len = q_sequence(p).length(tile.batch);
  const int kv_len = kv_sequence(p).length(tile.batch);
  const int tile_row = tile.row_block * kTileM;
  const Context ctx = {tile.batch, tile.head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
  const int kv_head = tile.head / p.group_size;
  const auto queries = q_rows(p, tile.batch, tile.head, q_len);
  const auto keys = k_rows(p, tile.batch, kv_head, kv_len);
  const auto values = v_rows(p, tile.batch, kv_head, kv_len);
  const auto copy_keys = [&](int block, u32 stage) {
    copy_rows<kThreads, kHeadDimQk, kTileN>(smem + kSmemK + stage * kKStageBytes, keys, block * kTileN);
  };
  const auto copy_values = [&](int block, u32 stage) {
    copy_rows<kThreads, kHeadDimV, kTileN>(smem + kSmemV + stage * kVStageBytes, values, block * kTileN);
  };
  const MaskList masks = mask_list(p);
  const BlockRange blocks = KvIteration::blocks<kTileN>(masks, ctx, tile_row, min_of(tile_row + kTileM, q_len) - 1);
  Warp warp(p, smem, ctx, tile_row);
  BlockRange own = {0, 0, 0, 0};
  if (warp.first < q_len) own = KvIteration::blocks<kTileN>(masks, ctx, warp.first, min_of(warp.first + kWarpRows, q_len) - 1);
  const int end = blocks.end;

  copy_rows<kThreads, kHeadDimQk, kTileM>(smem + kSmemQ, queries, tile_row);
  if (blocks.begin < end) {
    copy_keys(end - 1, 0);
  }
#pragma unroll 1
  for (int block = end - 1; block >= blocks.begin; --block) {
    await_copies();
    __syncthreads();  // keys are there, and nobody reads values any more
    copy_values(block, 0);
    const auto between = [&] {
      await_copies();
      // Values are there, and nobody reads keys any more. Warps come here by ways of their own, __syncthreads is for one.
      named_barrier_sync(1, kThreads);
      if (block > blocks.begin) copy_keys(block - 1, 0);
    };
    if (block < own.begin || block >= own.end) {
      between();
    } else if (kTellsFullBlocks && block < own.full_end && block >= own.full_begin) {
      warp.step<false>(ctx, block, 0, between);
    } else {
      warp.step<true>(ctx, block, 0, between);
    }
  }
  await_copies();  // of queries, where the tile sees no key
  warp.finish(ctx);
}

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(128, 2)
mma_fwd__causal_d128_bf16__4cc5b1(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
    const TileOrder order = {p.tiles_m, p.heads_q, p.total_heads, p.heads_per_group, p.tail_rows};

  const TileCoord tile = order.at<kLongestFirst>(blockIdx.x);
  run_tile(p, shared_address(shared), tile);
}
