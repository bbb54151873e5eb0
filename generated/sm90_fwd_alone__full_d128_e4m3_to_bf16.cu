// sm90_fwd_alone__full_d128_e4m3_to_bf16__fcff71
// Rendered by attngen from kernels/wgmma/forward/alone.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/transpose.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale.cuh"
#include "attngen/scheduler/cut_tiles.cuh"
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
constexpr int kLazyRescaleLog2 = 2;
constexpr int kSoftmaxParts = 1;
constexpr bool kPairSums = true;
constexpr bool kLongestFirst = false;
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
constexpr u32 kOnesBytes = 8 * 128;  // behind the one box of a stage
static_assert(kTileN <= 128 && kHeadDimV % 8 == 0);
constexpr u32 kVStageBytes = ceil_div(kTileN, 128) * kColumnBoxBytes + kOnesBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 24576;
constexpr u32 kSmemV = 49152;
constexpr u32 kSmemRaw = 83968;
constexpr u32 kSmemO = 108544;
constexpr u32 kSmemBarriers = 157696;
constexpr u32 kSmemJob = 158720;
constexpr u32 kJobBytes = 32;
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
// acc[64 x 136] (+)= A B^T, A (e4m3) in registers, B (e4m3) in shared memory with the reduction along its rows.
struct PvMma {
  static constexpr int kN = 136;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], float (&rest)[4], const u32 (&a)[12], const u32 (&b)[3], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %83, 0;\n"
        "mov.b64 b, {%80, %84};\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}, {%68, %69, %70, %71}, b, p, 1, 1;\n"
        "mov.b64 b, {%81, %84};\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}, {%72, %73, %74, %75}, b, 1, 1, 1;\n"
        "mov.b64 b, {%82, %84};\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}, {%76, %77, %78, %79}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(rest[0]), "+f"(rest[1]), "+f"(rest[2]), "+f"(rest[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// ---- the fragments
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
static_assert(sizeof(Params) == 704, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {};
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
  int first_row;
  int large_tiles;
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

using Tiles = CutTiles<kConsumers, 2>;  // of 64 rows a unit
ATTNGEN_DEVICE int units_of_head(const Params& p) { return ceil_div(q_sequence(p).length(0), 64); }

// ---- scheduler: one thread that draws tiles and works out their blocks, one tile ahead
struct Scheduler {
  const Params& p;
  u32 smem;
  Job* slot;

  // Found anew each time: the thread has few registers to keep it in.
  ATTNGEN_DEVICE Tiles tiles() const { return {units_of_head(p), p.total_heads, static_cast<volatile Job*>(slot)->large_tiles}; }

  ATTNGEN_DEVICE void publish(int index) const {
    const CutTile cut = tiles().at(index);
    const TileCoord tile = {cut.end, cut.head % p.heads_q, cut.head / p.heads_q};
    const Context ctx = tile_context(p, tile.batch, tile.head);
    const int row_block = cut.end;
    const int first = cut.begin * 64;
    const int last = min_of(cut.end * 64, ctx.q_len) - 1;
    const BlockRange blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, first, last);
    slot->row_block = row_block;
    slot->first_row = first;
    slot->head = tile.head;
    slot->kv_head = tile.head / p.group_size;
    slot->batch = tile.batch;
    slot->block_begin = blocks.begin;
    // A tile that sees no key visits one block, in which every key is masked.
    slot->block_end = max_of(blocks.end, blocks.begin + 1);
  }

  template <class Load>  // load(tile, parity): what the same thread loads of a tile
  ATTNGEN_DEVICE void run(Load load) const {
    slot->large_tiles = Tiles::of(units_of_head(p), p.total_heads, gridDim.x).large;
    u32 parity = 1;
    int index = blockIdx.x;
    while (index < tiles().count()) {
      publish(index);
      mbarrier_arrive(smem + kJobFull);
      parity ^= 1;
      load(*slot, parity);
      mbarrier_wait(smem + kJobEmpty, parity);
      // Each tile draws one number; whoever draws the last leaves the counter at zero.
      int* counter = static_cast<int*>(p.tile_counter);
      const int drawn = atomicAdd(counter, 1);
      if (drawn == tiles().count() - 1) atomicExch(counter, 0);
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
  float stored[4];  // sums of a block's weights as they are stored: two times a row's
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
    u32 steps[kPvSteps];
    steps_along<kPvSteps, kColumnBoxBytes>(steps, v_tile());
    wgmma_fence();
    PvMma::issue<1024>(output.sum, output.stored, weights, steps, add);
    wgmma_commit();
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

  // Begins sums of stored weights before every product, or tensor cores would cut what they become. The compiler makes
  // products wait for each other where it knows what they add to.
  ATTNGEN_DEVICE static void begin_stored(Accumulators& output) {
#pragma unroll
    for (float& sum : output.stored) sum = 0.f;
    settle(output.stored);
  }
  // Adds the sums of a complete product to their rows'. Each of a row's four threads has the whole, and takes its
  // share.
  ATTNGEN_DEVICE static void add_stored(Accumulators& output, HeldRows& state, bool grew, const float (&rescale)[2]) {
    if (grew) {
      output.stored[0] *= rescale[0];
      output.stored[2] *= rescale[1];
    }
    state.row_sum[0] += output.stored[0] * 0.25f;
    state.row_sum[1] += output.stored[2] * 0.25f;
    begin_stored(output);
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

  ATTNGEN_DEVICE static void begin_sum(Accumulators& output) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output.sum[i] = 0.f;
  }

  // Computes a block's scores together with the previous block's output, and weighs them. Where far blocks may be
  // passed over: returns whether this one was; kAfterFaint: the previous one was.
  template <bool kMasked, bool kDue = false>
  ATTNGEN_DEVICE void step(const Queries& queries, float (&scores)[kTileN / 2], Accumulators& output,
                           u32 (&weights)[kWeightRegisters], HeldRows& state, const Context& ctx, int row,
                           int block) {
    float rescale[2];
    forget(scores);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, true);
    wgmma_wait<1>();
    release_k();
    prepare_scores<kMasked>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums> softmax = {scale_log2, shift};
    softmax.bound_maxima(scores);
    const bool grew = softmax.raise_rarely(scores, state, slack, rescale);
    if constexpr (kDue) {  // among the exponentials, which keep another unit busy
      finish_product(output, grew, rescale);
      add_stored(output, state, grew, rescale);
      softmax.template scale_part<1>(scores);
      promote(output, state.row_sum, [&](int piece) { softmax.template exponentiate_piece<kHeadDimV / 16>(scores, piece); });
    } else {
      softmax.exponentiate_all(scores);  // under the product
      finish_product(output, grew, rescale);
      add_stored(output, state, grew, rescale);
    }
    pack_weights<Element, kTileN>(weights, scores);
  }
  // Blocks down to `end`, of which no key is hidden, two at a time: places in rings of two are constants then. The
  // ring of values is a block behind that of keys.
  ATTNGEN_DEVICE void run_blocks(const Queries& queries, float (&scores)[kTileN / 2], Accumulators& output,
                                 u32 (&weights)[kWeightRegisters], HeldRows& state, const Context& ctx, int row,
                                 int& block, int end) {
    static_assert(kKStages == 2 && kVStages == 2);
    bool second = k_ring.stage != 0;
    while (block > end) {
      if (!second) {
        k_ring.stage = 0;
        v_ring.stage = 1;
        step<false>(queries, scores, output, weights, state, ctx, row, block);
        if (--block == end) break;
      }
      second = false;
      k_ring.stage = 1;
      v_ring.stage = 0;
      step<false>(queries, scores, output, weights, state, ctx, row, block);
      --block;
    }
  }

  // Writes LSE and turns the row sums into the factors that normalise the output.
  ATTNGEN_DEVICE void finish_rows(RowState& state, float (&normalizer)[2], const Context& ctx, int row) const {
    const Softmax softmax = VanillaSoftmax{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = state.row_max[half] * kLn2 * scale_log2 - shift * kLn2;
      const SoftmaxRow result = softmax.finalize(ctx, most, quad_sum(state.row_sum[half]));
      normalizer[half] = result.normalizer;
      const int i = row + half * 8;
      // The largest weight of a row is 1, that of its maximum, wherever a key is visible, though beside
      // its sink it may be nothing.
      if (p.amax_s && (lane & 3) == 0 && i < ctx.q_len && state.row_max[half] != -kInfinity) *static_cast<float*>(p.amax_s) = 1.f;
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
    HeldRows state;
    float factor[2];
    begin_sum(output);
    output.weight[0] = output.weight[1] = 0.f;
    output.has_mean = false;
    take_scales(job);

    if (first < job.first_row) return pass_over_tile(job);
    take_queries(queries);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    // Queries in registers are released only now: ldmatrix may still be reading when the instruction after it
    // runs, and an arrival does not wait for it (seen as rare wrong rows); the product does.
    wgmma_wait<0>();
    release_k();
    int block = job.block_end - 1;
    prepare_scores<true>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums>{scale_log2, shift}.begin(scores, state, slack);
    pack_weights<Element, kTileN>(weights, scores);
    --block;
    const int full_begin = job.block_begin;
    state.row_sum[0] = state.row_sum[1] = 0.f;  // the first block's weights are in a product, too
    begin_stored(output);
    for (;;) {
      const int due = block - (kPromoteBlocks - 1);
      run_blocks(queries, scores, output, weights, state, ctx, row, block, max_of(due, full_begin - 1));
      if (block < full_begin) break;
      step<false, true>(queries, scores, output, weights, state, ctx, row, block);
      --block;
    }

    if (!kOutputOverQ) release_q();
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, true);
    wgmma_wait<0>();
    add_stored(output, state, false, factor);
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
sm90_fwd_alone__full_d128_e4m3_to_bf16__fcff71(const __grid_constant__ attngen::Params p) {
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
  for (u32 i = threadIdx.x; i < kVStages * kOnesBytes / 4; i += 512) {
    const u32 ones = kSmemV + i / (kOnesBytes / 4) * kVStageBytes + kColumnBoxBytes;
    reinterpret_cast<u32*>(shared + ones)[i % (kOnesBytes / 4)] = 0x38383838;
  }
  fence_async_shared();
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
