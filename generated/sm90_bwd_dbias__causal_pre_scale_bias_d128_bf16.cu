// sm90_bwd_dbias__causal_pre_scale_bias_d128_bf16__4d1205
// Rendered by attngen from kernels/wgmma/backward/dbias.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/score_tile.cuh"
#include "attngen/mma/stage.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/exactly.cuh"
#include "attngen/softmax/row.cuh"
#include "attngen/special.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
using Element = Bf16;

// ---- the plan
constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kQkSteps = (kHeadDimQk + 15) / 16;
constexpr int kVSteps = (kHeadDimV + 15) / 16;
constexpr int kQkBoxes = (kHeadDimQk + 63) / 64;
constexpr int kVBoxes = (kHeadDimV + 63) / 64;
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kSmemStages = 0;
constexpr u32 kSmemBias = 196608;
constexpr u32 kSmemBarriers = 229376;
constexpr u32 kSmemTerms = 229520;
constexpr int kStages = 3;  // of queries with keys, and of output gradients with values, in turn
constexpr int kRowBlock = 64;  // queries a block of the workspaces
constexpr u32 kStageBytes = (kQkBoxes > kVBoxes ? kQkBoxes : kVBoxes) * (kQueryBoxBytes + kKeyBoxBytes);

constexpr u32 kFull = kSmemBarriers;
constexpr u32 kEmpty = kFull + 8 * kStages;
constexpr u32 kTileFull = kEmpty + 8 * kStages;
constexpr u32 kDrawnFull = kTileFull + 8 * 4 * kConsumers;
constexpr u32 kDrawnEmpty = kDrawnFull + 8;
constexpr u32 kBlankFull = kDrawnEmpty + 8;
constexpr u32 kBlankEmpty = kBlankFull + 8;

constexpr u32 kConsumersBarrier = 1;  // named; 0 is __syncthreads

// acc[64 x 128] (+)= A B^T, both in shared memory, the reduction along A's rows and along B's.
struct ScoreMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[8], const u32 (&b)[8], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %80, 0;\n"
        "mov.b64 a, {%64, %81};\nmov.b64 b, {%72, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, p, 1, 1, 0, 0;\n"
        "mov.b64 a, {%65, %81};\nmov.b64 b, {%73, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%66, %81};\nmov.b64 b, {%74, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%67, %81};\nmov.b64 b, {%75, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%68, %81};\nmov.b64 b, {%76, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%69, %81};\nmov.b64 b, {%77, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%70, %81};\nmov.b64 b, {%78, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%71, %81};\nmov.b64 b, {%79, %82};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

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

struct TmaFetch {
  // Rows of one head into `kBoxes` boxes of kColumns columns and `box_bytes`; columns and rows outside the tensor
  // arrive as zeros, so a tail never carries NaN into a product.
  template <int kBoxes, int kColumns = 64, class Map, class BatchIndex>
  ATTNGEN_DEVICE static void load(u32 destination, u32 box_bytes, const Map* map, u32 barrier,
                                  int row, int head, BatchIndex batch, u64 policy) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      tma_load(destination + box * box_bytes, map, barrier, box * kColumns, row, head, batch, policy);
    }
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
struct ScoreList {
  PreScaleBias pre_scale_bias;

  // An element of the tile is in the units of the scores that it joins.
  ATTNGEN_HD static float tile_value(float element) { return element; }
  using At = Place<true>;

  ATTNGEN_HD float apply(const Context& ctx, float score, At at) const {
    score = pre_scale_bias.apply(ctx, score, at);
    return score;
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
using KvFetch = TmaFetch;

struct Params {
  TensorMap map_q;
  TensorMap map_k;
  TensorMap map_v;
  TensorMap map_d_o;
  void* lse;
  TensorMap map_bias;
  void* lse_log2;
  void* d;
  void* tile_counter;
  void* row_sums;
  void* dbias;
  int dbias_batches;
  int dbias_heads;
  int dbias_rows;
  int dbias_columns;
  int dbias_sums_rows;
  int sequences;
  int heads_q;
  int q_blocks;
  int group_size;
  int bottom_right;
  float scale;
  float scale_log2;
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
static_assert(sizeof(Params) == 896, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}
ATTNGEN_DEVICE ScoreList score_list(const Params& p, const Context&, float) {
  return {PreScaleBias{}};
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
// Where a block's rows lie in the workspaces: a number of blocks from their start.
ATTNGEN_DEVICE long long workspace_block(const Params& p, int batch, int head, int block) {
  return (static_cast<long long>(batch) * p.heads_q + head) * p.q_blocks + block;
}

// A tile of the gradient. Where rows are summed, one of all of them.
struct BiasTile {
  int batch;
  int head;
  int row_block;
  int key_block;
};

// The tiles: neighbours in a row, whose keys L2 keeps, follow each other.
struct BiasTiles {
  int key_blocks;
  int row_blocks;
  int heads;
  u32 count;

  ATTNGEN_DEVICE explicit BiasTiles(const Params& p)
      : key_blocks(ceil_div(p.dbias_columns, kTileN)),
        row_blocks(p.dbias_sums_rows ? 1 : ceil_div(p.dbias_rows, kTileM)),
        heads(p.dbias_heads),
        count(static_cast<u32>(key_blocks) * row_blocks * p.dbias_heads * p.dbias_batches) {}
  ATTNGEN_DEVICE BiasTile at(u32 index) const {
    const int above = index / key_blocks;
    const int outer = above / row_blocks;
    return {outer / heads, outer % heads, above - outer * row_blocks, static_cast<int>(index - above * key_blocks)};
  }
};

// Visits the terms of a tile in their order, by `visit(ctx, row_block, partial)` of each sequence, head and block
// of rows that sees some of its keys; `partial` where not all see all.
template <class Visitor>
ATTNGEN_DEVICE void for_each_term(const Params& p, const BiasTile& tile, Visitor visit) {
  const bool one_batch = p.dbias_batches > 1;
  const bool one_head = p.dbias_heads > 1;
#pragma unroll 1
  for (int batch = one_batch ? tile.batch : 0; batch < (one_batch ? tile.batch + 1 : p.sequences); ++batch) {
    Context ctx = tile_context(p, batch, 0);
    if (tile.key_block * kTileN >= ctx.kv_len) continue;
    const int row_blocks = ceil_div(ctx.q_len, kTileM);
    const int begin = p.dbias_sums_rows ? 0 : tile.row_block;
    const int end = p.dbias_sums_rows ? row_blocks : min_of(begin + 1, row_blocks);
#pragma unroll 1
    for (int row_block = begin; row_block < end; ++row_block) {
      const int first = row_block * kTileM;
      const BlockRange blocks = kv_block_range<kTileN>(mask_list(p), ctx, first, min_of(first + kTileM, ctx.q_len) - 1);
      if (tile.key_block < blocks.begin || tile.key_block >= blocks.end) continue;
      const bool partial = tile.key_block < blocks.full_begin || tile.key_block >= blocks.full_end || first + kTileM > ctx.q_len;
#pragma unroll 1
      for (int head = one_head ? tile.head : 0; head < (one_head ? tile.head + 1 : p.heads_q); ++head) {
        ctx.head = head;
        visit(ctx, row_block, partial);
      }
    }
  }
}

// A term that consumers add, from two stages; `kind` is made of the bits below. `before`: with the first
// of a tile, the index of the one before, which is complete.
struct Term {
  int batch;
  int head;
  int row_block;
  int key_block;
  u32 kind;
  u32 before;
};
constexpr u32 kPartial = 1;  // masks hide some of it
constexpr u32 kFirst = 2;    // of its tile
constexpr u32 kEnd = 4;      // no term: there are no more
constexpr u32 kNone = ~0u;
// Indices of tiles: one that the loader brings next, and one to be zeroed.
struct Progress {
  u32 drawn;
  u32 blank;
};

// ---- loader: one thread that tells consumers what to do and brings what they need
struct Loader {
  const Params& p;
  u32 smem;
  Term* terms;
  volatile Progress* progress;
  RingPosition<kStages> ring;
  u32 last = kNone;  // the tile before the one at hand

  ATTNGEN_DEVICE u32 full() const { return smem + kFull + ring.stage * 8; }
  // Says what a stage is for once its place is free.
  ATTNGEN_DEVICE void publish(const Term& term) const {
    await_place();
    terms[ring.stage] = term;
  }
  ATTNGEN_DEVICE void await_place() const { mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1); }
  // A tile of rows, and one of keys.
  template <int kBoxes, class RowMap, class KeyMap>
  ATTNGEN_DEVICE void load(const RowMap* row_map, const KeyMap* key_map, const Term& term) {
    const u32 place = smem + kSmemStages + ring.stage * kStageBytes;
    mbarrier_arrive_expect(full(), kBoxes * (kQueryBoxBytes + kKeyBoxBytes));
    TmaFetch::load<kBoxes>(place, kQueryBoxBytes, row_map, full(), q_sequence(p).first_row(term.batch) + term.row_block * kTileM,
                           term.head, q_sequence(p).batch_index(term.batch), kEvictLast);
    KvFetch::load<kBoxes>(place + kBoxes * kQueryBoxBytes, kKeyBoxBytes, key_map, full(), kv_sequence(p).first_row(term.batch) + term.key_block * kTileN,
                          term.head / p.group_size, kv_sequence(p).batch_index(term.batch), kEvictLast);
    ring.advance();
  }
  ATTNGEN_DEVICE void load(const Term& term) {
    publish(term);
    load<kQkBoxes>(&p.map_q, &p.map_k, term);
    await_place();
    load<kVBoxes>(&p.map_d_o, &p.map_v, term);
  }
  // The scheduler may draw another tile: where tiles are long, only once this one is loaded.
  ATTNGEN_DEVICE void ask() const {
    mbarrier_arrive(smem + kDrawnEmpty);
  }
  ATTNGEN_DEVICE void run() {
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kDrawnFull, parity);
      const u32 index = progress->drawn;
      if (index == kNone) break;
      if (!p.dbias_sums_rows) ask();
      const BiasTile tile = BiasTiles(p).at(index);
      for_each_term(p, tile, [&](const Context& ctx, int row_block, bool partial) {
        load({ctx.batch, ctx.head, row_block, tile.key_block, (last != index ? kFirst : 0) | (partial ? kPartial : 0), last});
        last = index;
      });
      if (p.dbias_sums_rows) ask();
    }
    publish({0, 0, 0, 0, kFirst | kEnd, last});
    mbarrier_arrive(full());
  }
};

// ---- scheduler: a warp that draws tiles, for the loader or, if they see no key, for the filler
struct Scheduler {
  const Params& p;
  u32 smem;
  volatile Progress* progress;
  int lane;
  u32 blank_parity = 1;

  // Each tile draws one number; whoever draws the last leaves the counter at zero.
  ATTNGEN_DEVICE u32 draw(u32 count) const {
    u32 drawn = 0;
    if (lane == 0) {
      int* counter = static_cast<int*>(p.tile_counter);
      drawn = atomicAdd(counter, 1);
      if (drawn == count - 1) atomicExch(counter, 0);
    }
    return __shfl_sync(~0u, drawn, 0) + gridDim.x;
  }
  ATTNGEN_DEVICE void hand_over(u32 index) const {
    if (lane > 0) return;
    progress->drawn = index;
    mbarrier_arrive(smem + kDrawnFull);
  }
  ATTNGEN_DEVICE void leave(u32 index) {
    if (lane > 0) return;
    mbarrier_wait(smem + kBlankEmpty, blank_parity);
    blank_parity ^= 1;
    progress->blank = index;
    mbarrier_arrive(smem + kBlankFull);
  }
  ATTNGEN_DEVICE void run() {
    const BiasTiles tiles(p);
    u32 parity = 0;
    for (u32 index = blockIdx.x; index < tiles.count; index = draw(tiles.count)) {
      const BiasTile tile = tiles.at(index);
      int terms = 0;
      for_each_term(p, tile, [&](const Context&, int, bool) { ++terms; });
      if (terms == 0) {
        leave(index);
        continue;
      }
      hand_over(index);
      mbarrier_wait(smem + kDrawnEmpty, parity);
      parity ^= 1;
    }
    hand_over(kNone);
    leave(kNone);
  }
};

// ---- filler: a warp that zeroes tiles
struct Filler {
  const Params& p;
  u32 smem;
  volatile Progress* progress;
  int lane;

  // Zeroes up to kUnits units of each row, `width` bytes; rows lie `pitch` bytes apart.
  template <class Unit, int kUnits>
  ATTNGEN_DEVICE void clear(char* first, int rows, long long pitch, int width) const {
#pragma unroll 4
    for (int i = lane; i < rows * kUnits; i += 32) {
      const int at = i % kUnits * static_cast<int>(sizeof(Unit));
      if (at < width) *reinterpret_cast<Unit*>(first + i / kUnits * pitch + at) = Unit();
    }
  }
  ATTNGEN_DEVICE void clear(const BiasTile& tile) const {
    const long long head = static_cast<long long>(tile.batch) * p.dbias_heads + tile.head;
    const int column = tile.key_block * kTileN;
    const int columns = min_of(p.dbias_columns - column, kTileN);
    if (p.dbias_sums_rows) {
      clear<float, kTileN>(reinterpret_cast<char*>(static_cast<float*>(p.dbias) + head * p.dbias_columns + column), 1, 0, columns * 4);
      return;
    }
    const int row = tile.row_block * kTileM;
    const int rows = min_of(p.dbias_rows - row, kTileM);
    const long long pitch = p.dbias_columns * 2ll;
    char* first = static_cast<char*>(p.dbias) + (head * p.dbias_rows + row) * pitch + column * 2;
    if (p.dbias_columns % 8 == 0) {
      clear<uint4, kTileN / 8>(first, rows, pitch, columns * 2);
    } else {
      clear<unsigned short, kTileN>(first, rows, pitch, columns * 2);
    }
  }
  ATTNGEN_DEVICE void run() const {
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kBlankFull, parity);
      const u32 index = __shfl_sync(~0u, lane == 0 ? progress->blank : 0, 0);
      if (lane == 0) mbarrier_arrive(smem + kBlankEmpty);
      if (index == kNone) return;
      clear(BiasTiles(p).at(index));
    }
  }
};

using ScoreTile = TileStage<16, kTileN>;  // a warp's part of the bias

// ---- consumer: 64 rows
struct Consumer {
  const Params& p;
  u32 smem;
  const volatile Term* terms;
  int warpgroup;
  int warp;
  int lane;
  RingPosition<kStages> ring;
  u32 tile_parity = 0;

  using Scores = float[kTileN / 2];
  // LSE (log2) and D of the thread's two rows.
  struct Rows {
    float lse[2];
    float d[2];
  };

  ATTNGEN_DEVICE ScoreTile score_tile() const { return {smem + kSmemBias + (warpgroup * 4 + warp) * ScoreTile::kBytes}; }
  // A stage's rows of this warpgroup, and its keys.
  ATTNGEN_DEVICE u32 rows() const { return smem + kSmemStages + ring.stage * kStageBytes + warpgroup * kWarpgroupBytes; }
  template <int kBoxes>
  ATTNGEN_DEVICE u32 keys() const { return smem + kSmemStages + ring.stage * kStageBytes + kBoxes * kQueryBoxBytes; }
  ATTNGEN_DEVICE void await_stage() const { mbarrier_wait(smem + kFull + ring.stage * 8, ring.parity); }
  // Every thread arrives: each has read the stage's term itself.
  ATTNGEN_DEVICE void release(u32 stage) const { mbarrier_arrive(smem + kEmpty + stage * 8); }

  ATTNGEN_DEVICE Rows load_rows(const Context& ctx, int row) const {
    const long long at = workspace_block(p, ctx.batch, ctx.head, 0) * kRowBlock;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = row + half * 8 < ctx.q_len;
      rows.lse[half] = inside ? static_cast<const float*>(p.lse_log2)[at + row + half * 8] : kInfinity;
      rows.d[half] = inside ? static_cast<const float*>(p.d)[at + row + half * 8] : 0.f;
    }
    return rows;
  }

  // Scores that a query does not have become -inf.
  ATTNGEN_DEVICE void hide(Scores& scores, const Context& ctx, bool partial, int row, int key_block) const {
    if (partial) {
      const MaskList masks = mask_list(p);
      const int column = key_block * kTileN + (lane & 3) * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row + half * 8;
        const Range range = masks.row_range(ctx, i);
        const int lo = range.lo - column;
        const int hi = i < ctx.q_len ? range.hi - column : 0;
#pragma unroll
        for (int k = 0; k < kTileN / 4; ++k) {
          const int at = fragment_index(half, k);
          scores[at] = fragment_column(at) < hi && (!MaskList::kBoundsLeft || fragment_column(at) >= lo) ? scores[at] : -kInfinity;
        }
      }
    }
  }

  // Weights of rows of which one has an LSE that shows no sum.
  ATTNGEN_DEVICE void weigh_large(Scores& scores, const Context& ctx, bool partial, int row, int key_block) const {
    hide(scores, ctx, partial, row, key_block);
    replace_pairs(scores, nullptr, [&](int i, float& one, float& other) -> u32 {
      const int query = row + fragment_row(i) * 8;
      const int j = key_block * kTileN + (lane & 3) * 2 + fragment_column(i);
      const float2 reference = reference_of(p, ctx, query);
      const auto weigh_one = [&](float product, int n) {
        if (product == -kInfinity || reference.x == kInfinity) return 0.f;
        return weight_beside(scaled_score(p, ctx, query, j + n, product), reference);
      };
      one = weigh_one(one, 0);
      other = weigh_one(other, 1);
      return 0;
    });
  }
  // S becomes the weights.
  ATTNGEN_DEVICE void weigh(Scores& scores, const Rows& rows, const Context& ctx, bool partial, int row, int key_block) const {
    const ScoreList list = score_list(p, ctx, p.scale);
    const int within = p.bias_stride_row == 0 ? 0 : lane & 15;
    const int first_key = key_block * kTileN + (lane & 3) * 2;
    const float distance[2] = {static_cast<float>(first_key - ctx.delta - row), static_cast<float>(first_key - ctx.delta - row - 8)};
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 8) {
      u32 pairs[4];
      score_tile().take<1>(pairs, i / 8, within, lane);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int half = fragment_row(i + k);
        const int step = fragment_column(i + k);
        const float2 pair = Element::unpack(pairs[k / 2]);
        const float read = list.tile_value(k % 2 ? pair.y : pair.x);
        const float raw = scores[i + k];
        const ScoreList::At at = {row + half * 8, first_key + step, distance[half], static_cast<float>(step), read};
        scores[i + k] = list.apply(ctx, raw, at);
      }
    }
    hide(scores, ctx, partial, row, key_block);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) scores[i] = exp2_approx(scores[i] * p.scale_log2 - rows.lse[fragment_row(i)]);
  }

  ATTNGEN_DEVICE static void clear(Scores& sums) {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sums[i] = 0.f;
  }
  // The bias of a tile comes to where the gradient of the one before was staged. All terms of a tile read the same
  // elements, whatever their lengths.
  ATTNGEN_DEVICE u32 tile_full() const { return smem + kTileFull + (warpgroup * 4 + warp) * 8; }
  ATTNGEN_DEVICE void fetch_score_tile(const Term& term, int row) const {
    const int first = row - lane / 4;
    if (!tile_boxed(p)) {
      const Context whole = {term.batch, term.head, kLongest, kLongest, 0};
      score_tile().copy(tile_source(p, whole), first, term.key_block * kTileN, lane);
    } else if (lane == 0) {
      mbarrier_arrive_expect(tile_full(), ScoreTile::kBytes);
      score_tile().load(&p.map_bias, tile_full(), p.bias_stride_row ? first : 0, term.key_block * kTileN, term.head, term.batch);
    }
  }
  ATTNGEN_DEVICE void await_score_tile() {
    if (tile_boxed(p)) {
      mbarrier_wait(tile_full(), tile_parity);
      tile_parity ^= 1;
    } else {
      await_copies();
      __syncwarp();
    }
  }

  // The term of the stage at hand.
  ATTNGEN_DEVICE Term term() const {
    const volatile Term& at = terms[ring.stage];
    return {at.batch, at.head, at.row_block, at.key_block, at.kind, at.before};
  }

  // Adds one sequence's and head's dS.
  ATTNGEN_DEVICE void add(Scores& sums, const Term& term, int row) {
    const Context ctx = tile_context(p, term.batch, term.head);
    const int key_block = term.key_block;
    Scores scores;
    Scores gradients;
    const Rows rows = load_rows(ctx, row);
    if (term.kind & kFirst) fetch_score_tile(term, row);
    gemm_shared_shared<ScoreMma, kQkSteps, kQueryBoxBytes, kKeyBoxBytes>(scores, this->rows(), keys<kQkBoxes>());
    const u32 of_queries = ring.stage;
    ring.advance();
    await_stage();
    gemm_shared_shared<ScoreMma, kVSteps, kQueryBoxBytes, kKeyBoxBytes>(gradients, this->rows(), keys<kVBoxes>());
    wgmma_wait<1>();
    settle(scores);
    release(of_queries);
    if (term.kind & kFirst) await_score_tile();
    if (__any_sync(~0u, rows.lse[0] == -kInfinity || rows.lse[1] == -kInfinity)) {
      weigh_large(scores, ctx, (term.kind & kPartial) != 0, row, key_block);
    } else {
      weigh(scores, rows, ctx, (term.kind & kPartial) != 0, row, key_block);
    }
    settle(scores);  // the weights, while the second product runs
    wgmma_wait<0>();
    settle(gradients);
    release(ring.stage);
    ring.advance();
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sums[i] += scores[i] * (gradients[i] - rows.d[fragment_row(i)]);
  }

  // A warp's rows as they are, staged where its bias lay: the copy engine's queue holds loads.
  ATTNGEN_DEVICE void store(const Scores& sums, const BiasTile& tile, float factor) const {
    __syncwarp();
    stage_rows<Element, kTileN, ScoreTile::kBoxBytes>(score_tile().place, sums, factor, 0, lane);
    fence_async_shared();  // the copy engine brings the next bias
    __syncwarp();
    if (p.dbias_columns % 8 == 0) {
      store_staged<uint4>(tile);
    } else {
      store_staged<unsigned short>(tile);
    }
    __syncwarp();
  }
  // A unit a lane at a time.
  template <class Unit>
  ATTNGEN_DEVICE void store_staged(const BiasTile& tile) const {
    constexpr int kElements = sizeof(Unit) / 2;
    constexpr u32 kUnits = kTileN / kElements;
    const int first = tile.row_block * kTileM + warpgroup * 64 + warp * 16;
    const u32 rows = max_of(p.dbias_rows - first, 0);
    const u32 columns = p.dbias_columns - tile.key_block * kTileN;
    const long long start = (static_cast<long long>(tile.batch) * p.dbias_heads + tile.head) * p.dbias_rows + first;
    unsigned short* to = static_cast<unsigned short*>(p.dbias) + start * p.dbias_columns + tile.key_block * kTileN;
    const char* from = static_cast<const char*>(__cvta_shared_to_generic(score_tile().place));
    const u32 lane = forget(this->lane) & 31;
#pragma unroll 8
    for (u32 k = 0; k < kUnits / 2; ++k) {
      const u32 row = (lane + 32 * k) / kUnits;
      const u32 at = (lane + 32 * k) % kUnits * kElements;
      const Unit unit = *reinterpret_cast<const Unit*>(from + ScoreTile::offset(row, at / 8) + at % 8 * 2);
      if (row < rows && at < columns) *reinterpret_cast<Unit*>(to + static_cast<long long>(row) * p.dbias_columns + at) = unit;
    }
  }

  // The sum of the tile's rows, in float32: of each warp by shuffles, of all in shared memory.
  ATTNGEN_DEVICE void store_sum(const Scores& sums, const BiasTile& tile, float factor) const {
    __syncwarp();
    float* shares = static_cast<float*>(__cvta_shared_to_generic(score_tile().place));
#pragma unroll
    for (int k = 0; k < kTileN / 4; ++k) {
      float sum = sums[fragment_index(0, k)] + sums[fragment_index(1, k)];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (lane < 4) shares[fragment_column(fragment_index(0, k)) + lane * 2] = sum;
    }
    fence_async_shared();
    named_barrier_sync(kConsumersBarrier, kConsumers * 128);
    const int column = warpgroup * 128 + warp * 32 + lane;
    const float* all = static_cast<const float*>(__cvta_shared_to_generic(smem + kSmemBias)) + column;
    if (column < kTileN && tile.key_block * kTileN + column < p.dbias_columns) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kConsumers * 4; ++i) sum += all[i * (ScoreTile::kBytes / 4)];
      const long long at = (static_cast<long long>(tile.batch) * p.dbias_heads + tile.head) * p.dbias_columns;
      static_cast<float*>(p.dbias)[at + tile.key_block * kTileN + column] = sum * factor;
    }
    named_barrier_sync(kConsumersBarrier, kConsumers * 128);
  }

  ATTNGEN_DEVICE void run() {
    const float factor = p.scale;
    const int within = warpgroup * 64 + warp * 16 + lane / 4;
    Scores sums;
    clear(sums);
    for (;;) {
      await_stage();
      const Term term = this->term();
      if (term.kind & kFirst && term.before != kNone) {
        const BiasTile done = BiasTiles(p).at(term.before);
        if (p.dbias_sums_rows) {
          store_sum(sums, done, factor);
        } else {
          store(sums, done, factor);
        }
        clear(sums);
      }
      if (term.kind & kEnd) break;
      add(sums, term, term.row_block * kTileM + within);
    }
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(384, 1)
sm90_bwd_dbias__causal_pre_scale_bias_d128_bf16__4d1205(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  Term* terms = reinterpret_cast<Term*>(shared + kSmemTerms);
  volatile Progress* progress = reinterpret_cast<volatile Progress*>(terms + kStages);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kFull + i * 8, 1);
      mbarrier_init(smem + kEmpty + i * 8, kConsumers * 128);
    }
    // Each warp's part of the bias, then what is drawn.
    for (int i = 0; i < kConsumers * 4 + 4; ++i) mbarrier_init(smem + kTileFull + i * 8, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Loader{p, smem, terms, progress}.run();
    if (threadIdx.x / 32 == 1) Scheduler{p, smem, progress, static_cast<int>(threadIdx.x % 32)}.run();
    if (threadIdx.x / 32 == 2) Filler{p, smem, progress, static_cast<int>(threadIdx.x % 32)}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, terms, role - 1, static_cast<int>(threadIdx.x % 128 / 32), static_cast<int>(threadIdx.x % 32)}.run();
  }
}
