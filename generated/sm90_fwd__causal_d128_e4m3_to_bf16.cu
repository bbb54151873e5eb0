// sm90_fwd__causal_d128_e4m3_to_bf16__96ea75
// Rendered by attngen from kernels/wgmma/forward/forward.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/transpose.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/online.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
// Elements of the weights; of queries and keys, where these differ; of an output in boxes.
using Element = E4m3;
using Output = Bf16;

// ---- the plan
constexpr int kTileM = 192;
constexpr int kTileN = 96;
constexpr int kKStages = 2;
constexpr int kVStages = 2;
constexpr int kRawStages = 2;
constexpr int kRawKeys = 96;
constexpr int kPromoteBlocks = 20;
constexpr int kConsumers = 3;
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 160;
constexpr int kLazyRescaleLog2 = 3;
constexpr int kSoftmaxParts = 1;
constexpr bool kPairSums = true;
constexpr bool kLongestFirst = true;
constexpr bool kOutputOverQ = false;

// A row of a box is 128 bytes, a step of a product's reduction 32.
constexpr int kBoxColumns = 128;
constexpr int kQkSteps = ceil_div(kHeadDimQk, kBoxColumns / 4);
constexpr int kPvSteps = kTileN / (kBoxColumns / 4);
constexpr int kQkBoxes = ceil_div(kHeadDimQk, kBoxColumns);
constexpr int kVBoxes = ceil_div(kHeadDimV, kBoxColumns);
constexpr int kOBoxColumns = 64;
constexpr int kOBoxes = ceil_div(kHeadDimV, kOBoxColumns);
constexpr int kWeightRegisters = kTileN / 8;
constexpr u32 kRowBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kColumnBoxBytes = kHeadDimV * 128;  // 128 keys of V, transposed
constexpr u32 kVStageBytes = ceil_div(kTileN, 128) * kColumnBoxBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 24576;
constexpr u32 kSmemV = 49152;
constexpr u32 kSmemRaw = 81920;
constexpr u32 kSmemO = 106496;
constexpr u32 kSmemBarriers = 155648;
constexpr u32 kSmemJob = 156672;
constexpr u32 kJobBytes = 24;
constexpr u32 kQFull = kSmemBarriers;
constexpr u32 kQEmpty = kQFull + 8 * kConsumers;
constexpr u32 kKFull = kQEmpty + 8 * kConsumers;
constexpr u32 kKEmpty = kKFull + 8 * kKStages;
constexpr u32 kVFull = kKEmpty + 8 * kKStages;
constexpr u32 kVEmpty = kVFull + 8 * kVStages;
constexpr u32 kJobFull = kVEmpty + 8 * kVStages;
constexpr u32 kJobEmpty = kJobFull + 8;
constexpr u32 kRawFull = kJobEmpty + 8;
constexpr u32 kRawEmpty = kRawFull + 8 * kRawStages;
// Named barriers: 0 is __syncthreads, then one a consumer for its turn, one for its epilogue.
constexpr u32 kTurnBarrier = 1;
constexpr u32 kEpilogueBarrier = kTurnBarrier + kConsumers;

// A job's row block says where a tile ends, in 64 rows: none of its rows above row 0 is there, nor is any
// output of theirs stored.
ATTNGEN_DEVICE int first_row_of(int row_block) { return (row_block - kConsumers) * 64; }

// acc[64 x 96] (+)= A B^T, A (e4m3) and B (e4m3) in shared memory with the reduction along their rows.
struct QkMma {
  static constexpr int kN = 96;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[48], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %56, 0;\n"
        "mov.b64 a, {%48, %57};\nmov.b64 b, {%52, %58};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%49, %57};\nmov.b64 b, {%53, %58};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%50, %57};\nmov.b64 b, {%54, %58};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%51, %57};\nmov.b64 b, {%55, %58};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

constexpr int kPvParts = 1;
// acc[64 x 128] (+)= A B^T, A (e4m3) in registers, B (e4m3) in shared memory with the reduction along its rows.
struct PvMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[12], const u32 (&b)[3], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %79, 0;\n"
        "mov.b64 b, {%76, %80};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, b, p, 1, 1;\n"
        "mov.b64 b, {%77, %80};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%68, %69, %70, %71}, b, 1, 1, 1;\n"
        "mov.b64 b, {%78, %80};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%72, %73, %74, %75}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

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
using KvFetch = TmaFetch;
using KvIteration = RangeIteration;
using Softmax = VanillaSoftmax;

struct Params {
  TensorMap map_q;
  TensorMap map_k;
  TensorMap map_v;
  TensorMap map_o;
  void* q;
  void* k;
  void* lse;
  void* descale_q;
  void* descale_k;
  void* descale_v;
  void* scale_s;
  void* descale_s;
  void* scale_o;
  void* amax_s;
  void* amax_o;
  void* tile_counter;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  int tiles;
  int tiles_m;
  int heads_q;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  float scale_log2;
  int descale_q_stride_batch;
  int descale_q_stride_head;
  int descale_k_stride_batch;
  int descale_k_stride_head;
  int descale_v_stride_batch;
  int descale_v_stride_head;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 768, "packed by the host");

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

// A tile, and the blocks of keys it visits, from block_end - 1 down to block_begin. A negative
// row_block ends the work. Of tiles of two sizes: first_row, above which are another tile's rows, and
// large_tiles of each head, in every job. Of sequences: their lengths and first tokens, where these vary;
// share of shares: of what belongs to no sequence, a tile's, or that of a CTA that has none.
struct Job {
  int row_block;
  int head;
  int kv_head;
  int batch;
  int block_begin;
  int block_end;
};
// Where a tensor map has the sequence of a job, or of the slot that it is in.
template <class AnyJob>
ATTNGEN_DEVICE int q_index(const AnyJob& job) { return job.batch; }
template <class AnyJob>
ATTNGEN_DEVICE int kv_index(const AnyJob& job) { return job.batch; }

ATTNGEN_DEVICE Context job_context(const Params& p, const Job& job) {
  const int q_len = q_sequence(p).length(q_index(job));
  const int kv_len = kv_sequence(p).length(kv_index(job));
  return {job.batch, job.head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}

// ---- scheduler: one thread that draws tiles and works out their blocks, one tile ahead
struct Scheduler {
  const Params& p;
  u32 smem;
  Job* slot;

  ATTNGEN_DEVICE void publish(int index) const {
    const TileOrder order = {p.tiles_m, p.heads_q, p.total_heads, p.heads_per_group, p.tail_rows};
    const TileCoord tile = order.at<kLongestFirst>(index);
    const Context ctx = tile_context(p, tile.batch, tile.head);
    const int row_block = end_of_tile<kConsumers>(tile.row_block, p.tiles_m, ceil_div(ctx.q_len, 64));
    const int first = max_of(first_row_of(row_block), 0);
    const int last = min_of(row_block * 64, ctx.q_len) - 1;
    const BlockRange blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, first, last);
    slot->row_block = row_block;
    slot->head = tile.head;
    slot->kv_head = tile.head / p.group_size;
    slot->batch = tile.batch;
    slot->block_begin = blocks.begin;
    // A tile that sees no key visits one block, in which every key is masked.
    slot->block_end = max_of(blocks.end, blocks.begin + 1);
  }

  template <class Load>  // load(tile, parity): what the same thread loads of a tile
  ATTNGEN_DEVICE void run(Load load) const {
    u32 parity = 1;
    int index = blockIdx.x;
    while (index < p.tiles) {
      publish(index);
      mbarrier_arrive(smem + kJobFull);
      parity ^= 1;
      load(*slot, parity);
      mbarrier_wait(smem + kJobEmpty, parity);
      // Each tile draws one number; whoever draws the last leaves the counter at zero.
      int* counter = static_cast<int*>(p.tile_counter);
      const int drawn = atomicAdd(counter, 1);
      if (drawn == p.tiles - 1) atomicExch(counter, 0);
      index = drawn + gridDim.x;
    }
    slot->row_block = -1;
    mbarrier_arrive(smem + kJobFull);
  }
};

// ---- loaders: a thread or a warp each for Q, K and V, so that none waits for another's buffer
struct QLoader {
  const Params& p;
  u32 smem;
  const volatile Job* slot;

  ATTNGEN_DEVICE void run() const {
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kJobFull, parity);
      const int row_block = slot->row_block;
      const int head = slot->head;
      const auto index = q_index(*slot);
      if (row_block < 0) break;
      load(row_block, head, index, parity);
    }
  }

  ATTNGEN_DEVICE void load(int row_block, int head, int index, u32 parity) const {
    mbarrier_arrive(smem + kJobEmpty);  // every thread: each has read the slot itself
    int row = q_sequence(p).first_row(index) + first_row_of(row_block);
#pragma unroll 1
    for (u32 consumer = 0; consumer < kConsumers; ++consumer, row += 64) {
      const u32 full = smem + kQFull + consumer * 8;
      mbarrier_wait(smem + kQEmpty + consumer * 8, parity ^ 1);
      mbarrier_arrive_expect(full, kQkBoxes * kWarpgroupBytes);
      TmaFetch::load<kQkBoxes, kBoxColumns>(smem + kSmemQ + consumer * kWarpgroupBytes, kRowBoxBytes, &p.map_q,
                               full, row, head, index, kEvictFirst);
    }
  }
};

// The blocks of K, or of V, of one tile after another into a ring of kStages buffers of kRows keys.
template <bool kOfKeys, int kBoxes, int kRows, int kStages, u32 kTiles, u32 kFull, u32 kEmpty>
struct KvLoader {
  const Params& p;
  const TensorMap* map;
  u32 smem;
  RingPosition<kStages> ring;

  // A block whose first key is at `first`.
  template <class Index>
  ATTNGEN_DEVICE void load(int first, int kv_head, const Index& index) {
    const u32 barrier = smem + kFull + ring.stage * 8;
    mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1);
    mbarrier_arrive_expect(barrier, kBoxes * kRows * 128);
    KvFetch::load<kBoxes, kBoxColumns>(smem + kTiles + ring.stage * (kBoxes * kRows * 128), kRows * 128,
                          map, barrier, first, kv_head, index, kEvictLast);
    ring.advance();
  }
};
using KLoader = KvLoader<true, kQkBoxes, kTileN, kKStages, kSmemK, kKFull, kKEmpty>;
using VLoader = KvLoader<false, kVBoxes, kRawKeys, kRawStages, kSmemRaw, kRawFull, kRawEmpty>;

// All that one thread loads, in the order in which consumers need it.
struct Loader {
  const Params& p;
  QLoader queries;
  KLoader keys;
  VLoader values;

  ATTNGEN_DEVICE void load(const Job& job, u32 parity) {
    const auto index = kv_index(job);
    const int begin = kv_sequence(p).first_row(index) + job.block_begin * kTileN;
    int first = begin + (job.block_end - 1 - job.block_begin) * kTileN;
    keys.load(first, job.kv_head, index);
    queries.load(job.row_block, job.head, q_index(job), parity);
#pragma unroll 1
    for (; first > begin; first -= kTileN) {
      keys.load(first - kTileN, job.kv_head, index);
      values.load(first, job.kv_head, index);
    }
    values.load(first, job.kv_head, index);
  }
};
// ---- transposer: warps that turn loaded blocks of V into what an 8-bit product can read
struct VTransposer {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  int warp;
  int lane;

  ATTNGEN_DEVICE void run() const {
    const KeyTransposer values(warp, lane);
    RingPosition<kRawStages> raw;
    RingPosition<kVStages> ring;
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(forget(static_cast<int>(smem)) + kJobFull, parity);  // no register across blocks
      const int row_block = slot->row_block;
      const int blocks = slot->block_end - slot->block_begin;
      if (row_block < 0) break;
      mbarrier_arrive(smem + kJobEmpty);  // every thread: each has read the slot itself
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        mbarrier_wait(smem + kVEmpty + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
        for (int key = 0; key < kTileN; key += kRawKeys) {
          mbarrier_wait(smem + kRawFull + raw.stage * 8, raw.parity);
          values.transpose<kRawKeys, kHeadDimV>(smem + kSmemRaw + raw.stage * (kVBoxes * kRawKeys * 128),
                                                 smem + kSmemV + ring.stage * kVStageBytes, key);
          __syncwarp();
          if (lane == 0) mbarrier_arrive(smem + kRawEmpty + raw.stage * 8);
          raw.advance();
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem + kVFull + ring.stage * 8);
        ring.advance();
      }
    }
  }
};

// A thread's part of 64 rows of output.
struct Accumulators {
  float sum[kHeadDimV / 2];
  // Tensor cores cut 8-bit products to the bits of the running sum, so every few blocks the sum
  // joins a mean in shared memory and starts anew. `weight`, relative to the present maxima, makes
  // sums of means; 0 while there is none.
  float weight[2];
  bool has_mean;
};

// ---- consumer: 64 rows of queries
struct Consumer {
  const Params& p;
  u32 smem;
  int warpgroup;
  int warp;
  int lane;
  RingPosition<kKStages> k_ring;
  RingPosition<kVStages> v_ring;
  // A tile's factors: of products of Q and K as stored, in log2 units, and of the finished output.
  float scale_log2;
  float shift;  // log2 of what weights are multiplied by
  float slack;  // log2 of how far a row may outgrow its maximum before this is raised
  float output_scale;

  ATTNGEN_DEVICE u32 output_tile() const { return smem + kSmemO + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 q_tile() const { return smem + kSmemQ + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 k_tile() const { return smem + kSmemK + k_ring.stage * kQkBoxes * kKeyBoxBytes; }
  ATTNGEN_DEVICE u32 v_tile() const { return smem + kSmemV + v_ring.stage * kVStageBytes; }

  ATTNGEN_DEVICE void release_q() const {
    if (lane == 0) mbarrier_arrive(smem + kQEmpty + warpgroup * 8);
  }
  ATTNGEN_DEVICE void release_k() {
    if (lane == 0) mbarrier_arrive(smem + kKEmpty + k_ring.stage * 8);
    k_ring.advance();
  }
  ATTNGEN_DEVICE void release_v() {
    if (lane == 0) mbarrier_arrive(smem + kVEmpty + v_ring.stage * 8);
    v_ring.advance();
  }
  // Passes over `count` blocks that none of the warpgroup's rows sees. Each is awaited, or an arrival might count for
  // the block that lay there before; and by every lane before one arrives, or the barrier might move on.
  ATTNGEN_DEVICE void pass_over_k(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
      __syncwarp();
      release_k();
    }
  }
  ATTNGEN_DEVICE void pass_over_v(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
      __syncwarp();
      release_v();
    }
  }
  // Passes over a tile of which the warpgroup has no row.
  ATTNGEN_DEVICE void pass_over_tile(const Job& job) {
    release_q();
#pragma unroll 1
    for (int passed = job.block_begin; passed < job.block_end; ++passed) {
      pass_over_k(1);  // in turns, or it would hold up values that others need to go on
      pass_over_v(1);
    }
  }

  // Takes the factors of stored numbers, which the job's sequence and head find.
  ATTNGEN_DEVICE void take_scales(const Job& job) {
    const float qk = read_scale(p.descale_q, job.batch * p.descale_q_stride_batch + job.kv_head * p.descale_q_stride_head) *
                     read_scale(p.descale_k, job.batch * p.descale_k_stride_batch + job.kv_head * p.descale_k_stride_head);
    scale_log2 = log2_scale(p.scale_log2 * qk);
    // Without a given scale a weight of 1 is stored as 2^8, so that e4m3 holds down to 2^-17.
    const float scale_s = p.scale_s ? weight_scale(read_scale(p.scale_s, 0)) : 256.f;
    const float descale_s = p.descale_s ? read_scale(p.descale_s, 0) : 1.f / 256.f;
    // A given scale says how the largest weight of a row is stored: maxima must be the true ones.
    slack = p.scale_s ? 0.f : kLazyRescaleLog2;
    shift = log2_approx(scale_s) - slack;
    output_scale = scale_s * descale_s *
                   read_scale(p.descale_v, job.batch * p.descale_v_stride_batch + job.kv_head * p.descale_v_stride_head);
  }

  // Completes the factors of the rows, and notes the largest output before the scale it is stored with.
  ATTNGEN_DEVICE void apply_output_scale(const float (&output)[kHeadDimV / 2], float (&normalizer)[2], const Context& ctx, int row) const {
    normalizer[0] *= output_scale;
    normalizer[1] *= output_scale;
    if (p.amax_o) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) {
        const int half = fragment_row(i);
        if (row + half * 8 < ctx.q_len) largest = fmaxf(largest, fabsf(output[i] * normalizer[half]));
      }
      atomic_max(static_cast<float*>(p.amax_o), warp_max(largest), lane);
    }
  }

  // The warpgroup's queries stay in shared memory.
  struct Queries {};

  ATTNGEN_DEVICE void take_queries(Queries&) const {}
  ATTNGEN_DEVICE void issue_scores(float (&scores)[kTileN / 2], const Queries&) const {
    gemm_shared_shared<QkMma, kQkSteps, kRowBoxBytes, kKeyBoxBytes, false>(scores, q_tile(), k_tile());
  }

  // Issues the product of weights and values. add: to the sum so far, else anew.
  ATTNGEN_DEVICE void issue_output(Accumulators& output, const u32 (&weights)[kWeightRegisters], bool add) const {
#pragma unroll
    for (int part = 0; part < kPvParts; ++part) {
      auto& acc = reinterpret_cast<float(&)[PvMma::kN / 2]>(output.sum[part * (PvMma::kN / 2)]);
      gemm_register_shared<PvMma, kPvSteps, kColumnBoxBytes>(acc, weights, v_tile() + part * (PvMma::kN * 128), add);
    }
  }

  // Turns scores into what the softmax takes: score fragments applied, invisible keys at -inf.
  template <bool kMasked>
  ATTNGEN_DEVICE void prepare_scores(float (&scores)[kTileN / 2], const Context& ctx, int row,
                                     int block) const {
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

  // Awaits the previous block's output.
  ATTNGEN_DEVICE void await_product() {
    wgmma_wait<0>();
    release_v();
  }
  // Awaits it, and makes sums relative to the new maxima.
  ATTNGEN_DEVICE void finish_product(Accumulators& output, bool grew, const float (&rescale)[2]) {
    await_product();
    rescale_output(output, grew, rescale);
  }
  ATTNGEN_DEVICE static void rescale_output(Accumulators& output, bool grew, const float (&rescale)[2]) {
    if (grew) {
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) output.sum[i] *= rescale[fragment_row(i)];
      output.weight[0] *= rescale[0];
      output.weight[1] *= rescale[1];
    }
  }

  // The place of elements 8 i to 8 i + 7 of this thread's mean, as float16: 16 bytes a thread, side by side, where the
  // warpgroup's output is staged in the end.
  ATTNGEN_DEVICE u32 mean_slot(int i) const {
    return output_tile() + i / 4 * kRowBoxBytes + (i % 4 * 128 + warp * 32 + lane) * 16;
  }
  ATTNGEN_DEVICE void add_mean(Accumulators& output) const {
    if (!output.has_mean) return;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 16; ++i) {
      u32 mean[4];
      load_shared_x4(mean, mean_slot(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = Fp16::unpack(mean[j]);
        output.sum[8 * i + 2 * j] += pair.x * output.weight[j % 2];
        output.sum[8 * i + 2 * j + 1] += pair.y * output.weight[j % 2];
      }
    }
  }
  // Adds the sum to the mean; the next product starts the sum anew. A stored weight is at most twice what it should be
  // (e4m3's smallest). So half of a mean is no larger than the largest of the values, whatever the number of keys, and
  // float16 holds it. beside(i): other work among the pieces.
  template <class Beside>
  ATTNGEN_DEVICE void promote(Accumulators& output, const float (&row_sum)[2], Beside beside) const {
    u32 share[2];  // of the mean so far in the new one
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = output.weight[half];
      // At most what stored weights may sum up to: of a scale that cuts them, sums of the others are far above.
      const float weight = fminf(fmaxf(2.f * quad_sum(row_sum[half]), 1e-30f), 0x1p28f);
      share[half] = Fp16::pack(old * reciprocal_approx(weight), 0.f);
      const float rounded = Fp16::unpack(share[half]).x;
      share[half] |= share[half] << 16;
      // The weight for which the rounded share is exact.
      output.weight[half] = rounded > 0.f ? old * reciprocal_approx(rounded) : weight;
      factor[half] = reciprocal_approx(output.weight[half]);
    }
    if (!output.has_mean) await_output_tile();
#pragma unroll
    for (int i = 0; i < kHeadDimV / 16; ++i) {
      u32 mean[4] = {0, 0, 0, 0};
      if (output.has_mean) load_shared_x4(mean, mean_slot(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* x = output.sum + 8 * i + 2 * j;
        mean[j] = Fp16::fma(mean[j], share[j % 2], Fp16::pack(x[0] * factor[j % 2], x[1] * factor[j % 2]));
      }
      beside(i);
      store_shared_x4(mean_slot(i), mean);
    }
    begin_sum(output);
    output.has_mean = true;
  }

  // The thread's scores of a block of which no key is hidden, made anew from memory: slowly, but hardly ever.
  ATTNGEN_DEVICE void remake_scores(float (&scores)[kTileN / 2], const Context& ctx, int row, int block) const {
    const char* queries = static_cast<const char*>(p.q) + ctx.batch * p.q_stride_batch + ctx.head * p.q_stride_head;
    const char* keys = static_cast<const char*>(p.k) + ctx.batch * p.k_stride_batch + ctx.head / p.group_size * p.k_stride_head;
    const int first = block * kTileN + (lane & 3) * 2;
    forget(scores);
#pragma unroll 1
    for (int i = 0; i < kTileN / 2; ++i) {
      const char* query = queries + min_of(row + fragment_row(i) * 8, ctx.q_len - 1) * p.q_stride_row;
      const char* key = keys + (first + fragment_column(i)) * p.k_stride_row;
      float sum = 0.f;
#pragma unroll 1
      for (int d = 0; d < kHeadDimQk; d += 4) {
        u32 a[2], b[2];
        E4m3::widen(a, *reinterpret_cast<const u32*>(query + d));
        E4m3::widen(b, *reinterpret_cast<const u32*>(key + d));
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const float2 x = Fp16::unpack(a[pair]);
          const float2 y = Fp16::unpack(b[pair]);
          sum += x.x * y.x + x.y * y.y;
        }
      }
#pragma unroll
      for (int j = 0; j < kTileN / 2; ++j) scores[j] = j == i ? sum : scores[j];
    }
  }
  // Weights of a block of which no key is hidden, by rows' offsets as they are, and the end of the product
  // before. Only what they sum up to says whether one is too large: then they and all before become smaller.
  ATTNGEN_DEVICE void weigh_trusted(float (&scores)[kTileN / 2], Accumulators& output, u32 (&weights)[kWeightRegisters], TrustedRows& state, const Context& ctx, int row, int block) {
    BlockSoftmax<kTileN, kPairSums> softmax = {scale_log2, shift};
    softmax.trust(state);
    float sum[2];
    softmax.exponentiate_all(scores);  // under the product
    await_product();
    // Packed on either way: of what both left, the compiler would pack four bytes in three instructions.
    if (!softmax.add_up(scores, sum)) {
      pack_weights<Element, kTileN>(weights, scores);
    } else {
      float rescale[2];
      if (softmax.overflowed(sum)) {
        remake_scores(scores, ctx, row, block);
        softmax.weigh_raised(scores, state, sum, rescale);
      } else {
        softmax.lower(scores, state, sum, rescale);
      }
      rescale_output(output, true, rescale);
      pack_weights<Element, kTileN>(weights, scores);
    }
    state.row_sum[0] += sum[0];
    state.row_sum[1] += sum[1];
  }

  ATTNGEN_DEVICE static void begin_sum(Accumulators& output) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output.sum[i] = 0.f;
  }

  // Computes a block's scores together with the previous block's output, and weighs them. Where far blocks may be
  // passed over: returns whether this one was; kAfterFaint: the previous one was.
  template <bool kMasked, bool kDue = false>
  ATTNGEN_DEVICE void step(const Queries& queries, float (&scores)[kTileN / 2], Accumulators& output,
                           u32 (&weights)[kWeightRegisters], TrustedRows& state, const Context& ctx, int row,
                           int block, bool due = false) {
    float rescale[2];
    forget(scores);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, true);
    wgmma_wait<1>();
    release_k();
    if constexpr (!kMasked && !kDue) {
      weigh_trusted(scores, output, weights, state, ctx, row, block);
      return;
    }
    prepare_scores<kMasked>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums> softmax = {scale_log2, shift};
    softmax.bound_maxima(scores);
    const bool grew = softmax.raise_rarely(scores, state, slack, rescale);
    if (due) {  // among the exponentials, which keep another unit busy
      finish_product(output, grew, rescale);
      softmax.template scale_part<1>(scores);
      promote(output, state.row_sum, [&](int piece) { softmax.template exponentiate_piece<kHeadDimV / 16>(scores, piece); });
    } else {
      softmax.exponentiate_all(scores);  // under the product
      finish_product(output, grew, rescale);
    }
    softmax.template sum_and_pack<Element>(scores, weights, state);
  }

  // Writes LSE and turns the row sums into the factors that normalise the output.
  ATTNGEN_DEVICE void finish_rows(TrustedRows& state, float (&normalizer)[2], const Context& ctx, int row) const {
    float* lse = static_cast<float*>(p.lse) + (static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * ctx.q_len;
    const Softmax softmax = VanillaSoftmax{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = state.offset[half] * kLn2;
      const SoftmaxRow result = softmax.finalize(ctx, most, quad_sum(state.row_sum[half]));
      normalizer[half] = result.normalizer;
      const int i = row + half * 8;
      if ((lane & 3) == 0 && i < ctx.q_len) lse[i] = result.lse;
      // The largest weight of a row is 1, that of its maximum, wherever a key is visible, though beside
      // its sink it may be nothing.
      if (p.amax_s && (lane & 3) == 0 && i < ctx.q_len && most != -kInfinity) *static_cast<float*>(p.amax_s) = 1.f;
    }
  }

  // The warpgroup's 64 rows into swizzled boxes, from where the copy engine clips the tail.
  ATTNGEN_DEVICE void stage_output(const float (&output)[kHeadDimV / 2], const float (&normalizer)[2]) const {
    const int row = warp * 16 + (lane & 15);
#pragma unroll
    for (int chunk = 0; chunk < kHeadDimV / 8; chunk += 2) {
      const u32 slot = ((chunk & 7) + (lane >> 4)) ^ (row & 7);
      const u32 address = output_tile() + chunk / 8 * kRowBoxBytes + row * 128 + slot * 16;
      const float* x = output + chunk * 4;
      const u32 a = Output::pack(x[0] * normalizer[0], x[1] * normalizer[0]);
      const u32 b = Output::pack(x[2] * normalizer[1], x[3] * normalizer[1]);
      if (chunk + 1 < kHeadDimV / 8) {
        store_matrix_x4(address, a, b, Output::pack(x[4] * normalizer[0], x[5] * normalizer[0]),
                        Output::pack(x[6] * normalizer[1], x[7] * normalizer[1]));
      } else {
        store_matrix_x2(address, a, b);
      }
    }
  }

  // The last tile's store must have read the staging buffer before anything is written there.
  ATTNGEN_DEVICE void await_output_tile() const {
    if (warp == 0 && lane == 0) tma_store_wait_read();
    named_barrier_sync(kEpilogueBarrier + warpgroup, 128);
  }
  ATTNGEN_DEVICE void store_output(const Job& job) const {
    const QSequence sequence = q_sequence(p);
    const int row = sequence.first_row(q_index(job)) + first_row_of(job.row_block) + warpgroup * 64;
#pragma unroll
    for (int box = 0; box < kOBoxes; ++box) {
      tma_store(&p.map_o, output_tile() + box * kRowBoxBytes, box * kOBoxColumns, row, job.head, q_index(job));
    }
    tma_store_commit();
  }

  ATTNGEN_DEVICE void run_tile(const Job& job) {
    const Context ctx = job_context(p, job);
    const int first = first_row_of(job.row_block) + warpgroup * 64;
    const int row = first + warp * 16 + lane / 4;
    const bool leader = warp == 0 && lane == 0;
    Queries queries;
    float scores[kTileN / 2];
    Accumulators output;
    u32 weights[kWeightRegisters];
    TrustedRows state;
    float factor[2];
    begin_sum(output);
    output.weight[0] = output.weight[1] = 0.f;
    output.has_mean = false;
    take_scales(job);

    if (first < 0) return pass_over_tile(job);
    const BlockRange blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, first, min_of(first + 64, ctx.q_len) - 1);
    const int block_end = end_of_share(blocks, job.block_end);
    pass_over_k(job.block_end - block_end);
    take_queries(queries);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    // Queries in registers are released only now: ldmatrix may still be reading when the instruction after it
    // runs, and an arrival does not wait for it (seen as rare wrong rows); the product does.
    pass_over_v(job.block_end - block_end);
    wgmma_wait<0>();
    release_k();
    int block = block_end - 1;
    prepare_scores<true>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums>{scale_log2, shift}.begin(scores, state);
    pack_weights<Element, kTileN>(weights, scores);
    --block;
    // Less a row, so that each has seen a key where none is hidden.
    const int full_end = KvIteration::blocks<kTileN>(mask_list(p), ctx, first - 1, min_of(first + 64, ctx.q_len) - 1).full_end;
    for (; block >= full_end && block >= job.block_begin; --block) step<true>(queries, scores, output, weights, state, ctx, row, block);
    const int full_begin = job.block_begin;
    for (int due = block - (kPromoteBlocks - 1); block >= full_begin; --block) {
      if (!p.scale_s) {  // else every maximum must be the true one
        for (; block > due && block >= full_begin; --block) step<false>(queries, scores, output, weights, state, ctx, row, block);
        if (block < full_begin) break;
      }
      step<false, true>(queries, scores, output, weights, state, ctx, row, block, block == due);
      if (block == due) due -= kPromoteBlocks;
    }

    if (!kOutputOverQ) release_q();
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, true);
    finish_rows(state, factor, ctx, row);
    wgmma_wait<0>();
    release_v();
    add_mean(output);
    await_output_tile();  // nor may another thread's mean be unread
    apply_output_scale(output.sum, factor, ctx, row);
    stage_output(output.sum, factor);
    fence_async_shared();
    named_barrier_sync(kEpilogueBarrier + warpgroup, 128);
    if (leader) {
      store_output(job);
      if (kOutputOverQ) {
        tma_store_wait_read();
        mbarrier_arrive(smem + kQEmpty + warpgroup * 8);
      }
    }
  }

  ATTNGEN_DEVICE void run(const Job* slot) {
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kJobFull, parity);
      const Job job = *slot;
      if (job.row_block < 0) break;
      mbarrier_wait(smem + kQFull + warpgroup * 8, parity);
      mbarrier_arrive(smem + kJobEmpty);  // every thread: each has read the slot itself
      run_tile(job);
    }
    if (warp == 0 && lane == 0) tma_store_wait_read();
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(512, 1)
sm90_fwd__causal_d128_e4m3_to_bf16__96ea75(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  static_assert(sizeof(Job) <= kJobBytes);
  Job* slot = reinterpret_cast<Job*>(shared + kSmemJob);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = threadIdx.x % 128 / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.map_q);
    tma_prefetch_map(&p.map_k);
    tma_prefetch_map(&p.map_v);
    tma_prefetch_map(&p.map_o);
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(smem + kQFull + i * 8, 1);
      mbarrier_init(smem + kQEmpty + i * 8, kOutputOverQ ? 1 : 4);
    }
    for (int i = 0; i < kKStages; ++i) {
      mbarrier_init(smem + kKFull + i * 8, 1);
      mbarrier_init(smem + kKEmpty + i * 8, kConsumers * 4);
    }
    for (int i = 0; i < kVStages; ++i) {
      mbarrier_init(smem + kVFull + i * 8, 3);
      mbarrier_init(smem + kVEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 1 + 96);  // consumers, loaders, and who transposes or widens
    for (int i = 0; i < kRawStages; ++i) {
      mbarrier_init(smem + kRawFull + i * 8, 1);
      mbarrier_init(smem + kRawEmpty + i * 8, 3);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Loader loader = {p, {p, smem, slot}, {p, &p.map_k, smem, {}}, {p, &p.map_v, smem, {}}};
      Scheduler{p, smem, slot}.run([&](const Job& job, u32 parity) { loader.load(job, parity); });
    }
    if (warp > 0) VTransposer{p, smem, slot, warp - 1, lane}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, warp, lane}.run(slot);
  }
}
