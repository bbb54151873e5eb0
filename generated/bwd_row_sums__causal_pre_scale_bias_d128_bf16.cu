// bwd_row_sums__causal_pre_scale_bias_d128_bf16__b5d40b
// Rendered by attngen from kernels/support/row_sums.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/score_tile.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/grid_place.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/softmax/exactly.cuh"
#include "attngen/softmax/row.cuh"
#include "attngen/special.cuh"

namespace attngen {

constexpr int kHeadDimQk = 128;
constexpr int kSteps = ceil_div(kHeadDimQk, 16);
constexpr int kTileM = 64;
constexpr int kKeys = 16;  // that a warp looks at at once
using Element = Bf16;

// ---- the fragments
struct CausalMask {
  // Keys that query i sees.
  ATTNGEN_HD Range row_range(const Context& ctx, int i) const { return {0, i + ctx.delta + 1}; }
  // Queries that see key j.
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const { return {j - ctx.delta, ctx.q_len}; }
};

struct PreScaleBias {
  template <class At>
  ATTNGEN_HD float apply(const Context&, float score, At at) const {
    return score + at.tile;
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

// A kernel's scores, in the order in which they apply before the softmax.
struct ScaledScoreList {
  PreScaleBias pre_scale_bias;
  float unit;

  // An element of the tile is in the units of the scores that it joins.
  ATTNGEN_HD static float tile_value(float element) { return element; }
  using At = Place<true>;

  ATTNGEN_HD float apply(const Context& ctx, float score, At at) const {
    score = pre_scale_bias.apply(ctx, score, at);
    return score * unit;
  }
};

using QSequence = DenseSequence;
using KvSequence = DenseSequence;
using KvIteration = RangeIteration;

struct Params {
  void* q;
  void* k;
  void* lse;
  void* row_sums;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  int heads_q;
  int group_size;
  int q_blocks;
  int bottom_right;
  float scale;
  void* bias;
  long long bias_stride_batch;
  long long bias_stride_head;
  long long bias_stride_row;
  long long bias_stride_column;
  int bias_rows;
  int bias_columns;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 160, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}

ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return DenseSequence{p.q_len}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return DenseSequence{p.kv_len}; }

ATTNGEN_DEVICE Context tile_context(const Params& p, int batch, int head) {
  const int q_len = q_sequence(p).length(batch);
  const int kv_len = kv_sequence(p).length(batch);
  return {batch, head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}
ATTNGEN_DEVICE TileSource tile_source(const Params& p, const Context& ctx) {
  return {static_cast<const unsigned short*>(p.bias) + ctx.batch * p.bias_stride_batch + ctx.head * p.bias_stride_head,
          p.bias_stride_row, p.bias_stride_column, min_of(p.bias_rows, ctx.q_len), min_of(p.bias_columns, ctx.kv_len)};
}
// Whether the copy engine can read it: the host made a map of it then.
ATTNGEN_DEVICE bool tile_boxed(const Params& p) {
  const long long strides = p.bias_stride_batch | p.bias_stride_head | p.bias_stride_row;
  const long long places = reinterpret_cast<long long>(p.bias) | strides * 2;
  return places % 16 == 0 && strides < (1ll << 39) && p.bias_stride_column == 1;
}

ATTNGEN_DEVICE ScaledScoreList scaled_score_list(const Params& p, const Context&, float unit) {
  return {PreScaleBias{}, unit};
}

// The scaled score of a query and a key that it sees, from their product, and its derivative if scores bend.
ATTNGEN_DEVICE float scaled_score(const Params& p, const Context& ctx, int query, int key, float product) {
  const ScaledScoreList list = scaled_score_list(p, ctx, p.scale);
  const TileSource source = tile_source(p, ctx);
  const bool there = query < source.rows && key < source.columns;
  const u32 bits = there ? source.first[query * source.stride_row + key * source.stride_column] : 0;
  const ScaledScoreList::At at = {query, key, static_cast<float>(key - ctx.delta - query), 0.f, list.tile_value(Element::unpack(bits).x)};
  return list.apply(ctx, product, at);
}
// Where the LSE of a query lies, and its row of sums.
ATTNGEN_DEVICE long long lse_place(const Params& p, const Context& ctx, int query) {
  return (static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * ctx.q_len + query;
}
// The reference of the weights of a query's row, and log2 of the sum that they are divided by.
ATTNGEN_DEVICE float2 reference_of(const Params& p, const Context& ctx, int query) {
  if (query >= ctx.q_len) return make_float2(kInfinity, 0.f);
  const long long place = lse_place(p, ctx, query);
  const float lse = static_cast<const float*>(p.lse)[place];
  if (is_large(lse)) return static_cast<const float2*>(p.row_sums)[place];
  return make_float2(lse == -kInfinity ? kInfinity : lse, 0.f);
}
// Loads two neighbours of a row of queries or keys: zeros beyond its end.
ATTNGEN_DEVICE u32 load_pair(const unsigned short* row, int column) {
  return column < kHeadDimQk ? *reinterpret_cast<const u32*>(row + column) : 0;
}

// Largest scores of the thread's two rows of a warp's 16, and sums of weights beside these.
struct RowSums {
  float largest[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.f, 0.f};

  ATTNGEN_DEVICE void add(int half, float score) {
    if (score == -kInfinity) return;
    const float top = fmaxf(largest[half], score);
    sum[half] = sum[half] * weight_of(largest[half], top) + weight_of(score, top);
    largest[half] = top;
  }
  // Joins what the four threads of a row have.
  ATTNGEN_DEVICE void join(int half) {
    const float top = quad_max(largest[half]);
    sum[half] = quad_sum(sum[half] * weight_of(largest[half], top));
    largest[half] = top;
  }
  ATTNGEN_DEVICE static float weight_of(float score, float top) {
    return score == -kInfinity ? 0.f : exp2_approx((score - top) * kLog2E);
  }
};

}  // namespace attngen

// Grid: blocks of queries, query heads, batch.
extern "C" __global__ void __launch_bounds__(128)
bwd_row_sums__causal_pre_scale_bias_d128_bf16__b5d40b(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  allow_dependents();
  const int ctas = p.q_blocks;
  const GridPlace at = grid_place(ctas, p.heads_q);
  // The last blocks come first: their sums are in L2 when the main kernel has ended.
  const int index = ctas - 1 - at.index;
  const int head = p.heads_q - 1 - at.head;
  const int block = index;
  const int batch = at.batches - 1 - at.batch;
  const long long slot = (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;  // in the workspaces
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int row = block * kTileM + warp * 16 + lane / 4;
  const Context ctx = tile_context(p, batch, head);
  bool large = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + half * 8;
    if (i < ctx.q_len) large = large || is_large(static_cast<const float*>(p.lse)[lse_place(p, ctx, i)]);
  }
  if (!__any_sync(~0u, large)) return;

  const auto row_of = [&](const void* tensor, long long first, long long stride_batch, int of_head, long long stride_head, int at, long long stride_row) {
    return static_cast<const unsigned short*>(tensor) + batch * stride_batch + of_head * stride_head + (first + at) * stride_row;
  };
  const int last_row = ctx.q_len - 1;
  u32 queries[kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned short* query = row_of(p.q, 0, p.q_stride_batch, head, p.q_stride_head, min_of(row + half * 8, last_row), p.q_stride_row);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int column = step * 16 + (lane & 3) * 2;
      queries[step][half] = load_pair(query, column);
      queries[step][half + 2] = load_pair(query, column + 8);
    }
  }
  const MaskList masks = mask_list(p);
  const Range ranges[2] = {masks.row_range(ctx, min_of(row, last_row)), masks.row_range(ctx, min_of(row + 8, last_row))};
  RowSums sums;
  const int first_row = block * kTileM + warp * 16;
  const BlockRange visits = KvIteration::blocks<kKeys>(masks, ctx, min_of(first_row, last_row), min_of(first_row + 15, last_row));
#pragma unroll 1
  for (int key_block = visits.begin; key_block < visits.end; ++key_block) {
    float products[8] = {};
    const unsigned short* keys[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = min_of(key_block * kKeys + n * 8 + lane / 4, ctx.kv_len - 1);
      keys[n] = row_of(p.k, 0, p.k_stride_batch, head / p.group_size, p.k_stride_head, key, p.k_stride_row);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int column = step * 16 + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Element::multiply_add(products + n * 4, queries[step], load_pair(keys[n], column),
                              load_pair(keys[n], column + 8));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = fragment_row(i);
      const int key = key_block * kKeys + (lane & 3) * 2 + fragment_column(i);
      const int query = min_of(row + half * 8, last_row);
      bool seen = key >= ranges[half].lo && key < ranges[half].hi;
      sums.add(half, seen ? scaled_score(p, ctx, query, key, products[i]) : -kInfinity);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums.join(half);
    const int i = row + half * 8;
    if ((lane & 3) != 0 || i >= ctx.q_len) continue;
    const long long place = lse_place(p, ctx, i);
    const float lse = static_cast<const float*>(p.lse)[place];
    if (!is_large(lse)) continue;
    // A sink that outweighs the keys shows in the LSE.
    const float own = sums.largest[half] + log2_approx(sums.sum[half]) * kLn2;
    const bool beside_sink = lse - own > fabsf(lse) * 0x1p-21f;
    static_cast<float2*>(p.row_sums)[place] = beside_sink ? make_float2(lse, 0.f) : make_float2(sums.largest[half], log2_approx(sums.sum[half]));
  }
}
