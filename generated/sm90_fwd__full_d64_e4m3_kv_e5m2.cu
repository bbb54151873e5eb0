// sm90_fwd__full_d64_e4m3_kv_e5m2__2d7bc9
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
constexpr int kHeadDimQk = 64;
constexpr int kHeadDimV = 64;
// Elements of the weights; of queries and keys, where these differ; of an output in boxes.
using Element = E4m3;
using Output = E4m3;

// ---- the plan
constexpr int kTileM = 128;
constexpr int kTileN = 192;
constexpr int kKStages = 2;
constexpr int kVStages = 2;
constexpr int kRawStages = 2;
constexpr int kRawKeys = 192;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 224;
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
constexpr int kOBoxColumns = 128;
constexpr int kOBoxes = ceil_div(kHeadDimV, kOBoxColumns);
constexpr int kWeightRegisters = kTileN / 8;
constexpr u32 kRowBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kColumnBoxBytes = kHeadDimV * 128;  // 128 keys of V, transposed
constexpr u32 kVStageBytes = ceil_div(kTileN, 128) * kColumnBoxBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 16384;
constexpr u32 kSmemV = 65536;
constexpr u32 kSmemRaw = 98304;
constexpr u32 kSmemO = 147456;
constexpr u32 kSmemBarriers = 163840;
constexpr u32 kSmemJob = 164864;
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

// acc[64 x 192] (+)= A B^T, A (e4m3) in registers, B (e5m2) in shared memory with the reduction along its rows.
struct QkMma {
  static constexpr int kN = 192;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[96], const u32 (&a)[8], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %106, 0;\n"
        "mov.b64 b, {%104, %107};\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%96, %97, %98, %99}, b, p, 1, 1;\n"
        "mov.b64 b, {%105, %107};\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%100, %101, %102, %103}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]), "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79]), "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]), "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]), "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

constexpr int kPvParts = 1;
// acc[64 x 64] (+)= A B^T, A (e4m3) in registers, B (e5m2) in shared memory with the reduction along its rows.
struct PvMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[24], const u32 (&b)[6], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %62, 0;\n"
        "mov.b64 b, {%56, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1;\n"
        "mov.b64 b, {%57, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%36, %37, %38, %39}, b, 1, 1, 1;\n"
        "mov.b64 b, {%58, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%40, %41, %42, %43}, b, 1, 1, 1;\n"
        "mov.b64 b, {%59, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%44, %45, %46, %47}, b, 1, 1, 1;\n"
        "mov.b64 b, {%60, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%48, %49, %50, %51}, b, 1, 1, 1;\n"
        "mov.b64 b, {%61, %63};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%52, %53, %54, %55}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(a[16]), "r"(a[17]), "r"(a[18]), "r"(a[19]), "r"(a[20]), "r"(a[21]), "r"(a[22]), "r"(a[23]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
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
    const int first = tile.row_block * kTileM;
    const int last = min_of(first + kTileM, ctx.q_len) - 1;
    const BlockRange blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, first, last);
    slot->row_block = tile.row_block;
    slot->head = tile.head;
    slot->kv_head = tile.head / p.group_size;
    slot->batch = tile.batch;
    slot->block_begin = blocks.begin;
    // A tile that sees no key visits one block, in which every key is masked.
    slot->block_end = max_of(blocks.end, blocks.begin + 1);
  }

  ATTNGEN_DEVICE void run() const {
    u32 parity = 1;
    int index = blockIdx.x;
    while (index < p.tiles) {
      publish(index);
      mbarrier_arrive(smem + kJobFull);
      parity ^= 1;
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
    int row = q_sequence(p).first_row(index) + row_block * kTileM;
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
  const volatile Job* slot;

  ATTNGEN_DEVICE void run() const {
    RingPosition<kStages> ring;
    bool held = !kOfKeys;
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kJobFull, parity);
      const int row_block = slot->row_block;
      const int kv_head = slot->kv_head;
      const auto index = kv_index(*slot);
      const int block_begin = slot->block_begin;
      int block = slot->block_end;
      if (row_block < 0) break;
      // All CTAs begin at once: their first values would hold up what the first scores need. A later
      // phase of this barrier needs another tile, and so the arrival below.
      if (held) mbarrier_wait(smem + kQFull + (kConsumers - 1) * 8, 0);
      held = false;
      mbarrier_arrive(smem + kJobEmpty);
      const int first_row = kv_sequence(p).first_row(index);
#pragma unroll 1
      while (--block >= block_begin) {
#pragma unroll
        for (int row = 0; row < kTileN; row += kRows) {
          const u32 barrier = smem + kFull + ring.stage * 8;
          mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1);
          mbarrier_arrive_expect(barrier, kBoxes * kRows * 128);
          KvFetch::load<kBoxes, kBoxColumns>(smem + kTiles + ring.stage * (kBoxes * kRows * 128), kRows * 128,
                                map, barrier, first_row + block * kTileN + row, kv_head, index, kEvictLast);
          ring.advance();
        }
      }
    }
  }
};
using KLoader = KvLoader<true, kQkBoxes, kTileN, kKStages, kSmemK, kKFull, kKEmpty>;
using VLoader = KvLoader<false, kVBoxes, kRawKeys, kRawStages, kSmemRaw, kRawFull, kRawEmpty>;
// ---- transposer: warps that turn loaded blocks of V into what an 8-bit product can read
struct VTransposer {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  int warp;
  int lane;

  ATTNGEN_DEVICE void run() const {
    const ColumnTransposer values(warp, lane);
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
  // Tensor cores cut 8-bit products to the bits of the running sum, so every block's sum joins a
  // total, which is relative to the maxima before the last `rescale`.
  float total[kHeadDimV / 2];
  float rescale[2];
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
    const float scale_o = read_scale(p.scale_o, 0);
    // Finite, so that an output of 0 stays one.
    normalizer[0] = limited(normalizer[0] * scale_o);
    normalizer[1] = limited(normalizer[1] * scale_o);
  }

  // The warpgroup's queries, in registers for the whole tile: their buffer is free at once, and
  // the products read half as much shared memory.
  using Queries = u32[4 * kQkSteps];

  ATTNGEN_DEVICE void take_queries(Queries& queries) const {
    load_operand<kQkSteps, kRowBoxBytes>(queries, q_tile(), warp, lane);
  }
  ATTNGEN_DEVICE void issue_scores(float (&scores)[kTileN / 2], const Queries& queries) const {
    gemm_register_shared<QkMma, kQkSteps, kKeyBoxBytes>(scores, queries, k_tile());
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
    add_total(output.total, output);
    output.rescale[0] = rescale[0];
    output.rescale[1] = rescale[1];
  }
  ATTNGEN_DEVICE static void add_total(float (&result)[kHeadDimV / 2], const Accumulators& output) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) result[i] = output.total[i] * output.rescale[fragment_row(i)] + output.sum[i];
  }

  ATTNGEN_DEVICE static void begin_sum(Accumulators& output) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output.total[i] = 0.f;
  }

  // Computes a block's scores together with the previous block's output, and weighs them. Where far blocks may be
  // passed over: returns whether this one was; kAfterFaint: the previous one was.
  template <bool kMasked>
  ATTNGEN_DEVICE void step(const Queries& queries, float (&scores)[kTileN / 2], Accumulators& output,
                           u32 (&weights)[kWeightRegisters], HeldRows& state, const Context& ctx, int row,
                           int block) {
    float rescale[2] = {1.f, 1.f};
    forget(scores);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, false);
    wgmma_wait<1>();
    release_k();
    prepare_scores<kMasked>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums> softmax = {scale_log2, shift};
    softmax.bound_maxima(scores);
    const bool grew = softmax.raise_rarely(scores, state, slack, rescale);
    softmax.exponentiate_all(scores);  // under the product
    finish_product(output, grew, rescale);
    softmax.template sum_and_pack<Element>(scores, weights, state);
  }

  // Writes LSE and turns the row sums into the factors that normalise the output.
  ATTNGEN_DEVICE void finish_rows(RowState& state, float (&normalizer)[2], const Context& ctx, int row) const {
    float* lse = static_cast<float*>(p.lse) + (static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * ctx.q_len;
    const Softmax softmax = VanillaSoftmax{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = state.row_max[half] * kLn2 * scale_log2 - shift * kLn2;
      const SoftmaxRow result = softmax.finalize(ctx, most, quad_sum(state.row_sum[half]));
      normalizer[half] = result.normalizer;
      const int i = row + half * 8;
      if ((lane & 3) == 0 && i < ctx.q_len) lse[i] = result.lse;
      // The largest weight of a row is 1, that of its maximum, wherever a key is visible, though beside
      // its sink it may be nothing.
      if (p.amax_s && (lane & 3) == 0 && i < ctx.q_len && state.row_max[half] != -kInfinity) *static_cast<float*>(p.amax_s) = 1.f;
    }
  }

  // The warpgroup's 64 rows into swizzled boxes, from where the copy engine clips the tail.
  ATTNGEN_DEVICE void stage_output(const float (&output)[kHeadDimV / 2], const float (&normalizer)[2]) const {
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 2) {
      const int half = fragment_row(i);
      const int column = fragment_column(i) + (lane & 3) * 2;
      const u32 slot = (column / 16 & 7) ^ ((row + half * 8) & 7);
      const u32 address = output_tile() + column / 128 * kRowBoxBytes + (row + half * 8) * 128 + slot * 16 + column % 16;
      store_shared_16(address, Output::pack(output[i] * normalizer[half], output[i + 1] * normalizer[half]));
    }
  }

  // The last tile's store must have read the staging buffer before anything is written there.
  ATTNGEN_DEVICE void await_output_tile() const {
    if (warp == 0 && lane == 0) tma_store_wait_read();
    named_barrier_sync(kEpilogueBarrier + warpgroup, 128);
  }
  ATTNGEN_DEVICE void store_output(const Job& job) const {
    const QSequence sequence = q_sequence(p);
    const int row = sequence.first_row(q_index(job)) + job.row_block * kTileM + warpgroup * 64;
#pragma unroll
    for (int box = 0; box < kOBoxes; ++box) {
      tma_store(&p.map_o, output_tile() + box * kRowBoxBytes, box * kOBoxColumns, row, job.head, q_index(job));
    }
    tma_store_commit();
  }

  ATTNGEN_DEVICE void run_tile(const Job& job) {
    const Context ctx = job_context(p, job);
    const int first = job.row_block * kTileM + warpgroup * 64;
    const int row = first + warp * 16 + lane / 4;
    const bool leader = warp == 0 && lane == 0;
    Queries queries;
    float scores[kTileN / 2];
    Accumulators output;
    u32 weights[kWeightRegisters];
    HeldRows state;
    float factor[2];
    begin_sum(output);
    output.rescale[0] = output.rescale[1] = 1.f;
    take_scales(job);

    take_queries(queries);
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    // Queries in registers are released only now: ldmatrix may still be reading when the instruction after it
    // runs, and an arrival does not wait for it (seen as rare wrong rows); the product does.
    release_q();
    wgmma_wait<0>();
    release_k();
    int block = job.block_end - 1;
    prepare_scores<true>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums>{scale_log2, shift}.begin(scores, state, slack);
    pack_weights<Element, kTileN>(weights, scores);
    --block;
    const int full_begin = job.block_begin;
    for (; block >= full_begin; --block) step<false>(queries, scores, output, weights, state, ctx, row, block);

    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights, false);
    finish_rows(state, factor, ctx, row);
    if (!kOutputOverQ) await_output_tile();
    wgmma_wait<0>();
    release_v();
    add_total(output.sum, output);
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
sm90_fwd__full_d64_e4m3_kv_e5m2__2d7bc9(const __grid_constant__ attngen::Params p) {
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
      mbarrier_init(smem + kVFull + i * 8, 4);
      mbarrier_init(smem + kVEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 3 + 128);  // consumers, loaders, and who transposes or widens
    for (int i = 0; i < kRawStages; ++i) {
      mbarrier_init(smem + kRawFull + i * 8, 1);
      mbarrier_init(smem + kRawEmpty + i * 8, 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot}.run();
    if (threadIdx.x == 32) QLoader{p, smem, slot}.run();
    if (threadIdx.x == 64) KLoader{p, &p.map_k, smem, slot}.run();
    if (threadIdx.x == 96) VLoader{p, &p.map_v, smem, slot}.run();
  } else if (role == 1) {
    release_registers<kProducerRegisters>();
    VTransposer{p, smem, slot, warp, lane}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 2, warp, lane}.run(slot);
  }
}
