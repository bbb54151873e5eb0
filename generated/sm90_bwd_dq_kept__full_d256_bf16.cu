// sm90_bwd_dq_kept__full_d256_bf16__3db4a1
// Rendered by attngen from kernels/wgmma/backward/dq_kept.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/stage.cuh"
#include "attngen/mma/store.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 256;
constexpr int kHeadDimV = 256;
using Element = Bf16;

// ---- the plan
constexpr int kTileM = 192;
constexpr int kTileN = 64;
constexpr int kConsumers = 3;
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 160;
constexpr int kQkSteps = (kHeadDimQk + 15) / 16;
constexpr int kVSteps = (kHeadDimV + 15) / 16;
constexpr int kQkBoxes = (kHeadDimQk + 63) / 64;
constexpr int kVBoxes = (kHeadDimV + 63) / 64;
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kSmemK = 0;
constexpr u32 kSmemDs = 131072;
constexpr u32 kSmemBarriers = 229376;
constexpr u32 kSmemJob = 229456;
constexpr u32 kJobBytes = 24;
constexpr int kStages = 4;  // of keys and of dS
constexpr u32 kKeyBytes = kQkBoxes * kKeyBoxBytes;

constexpr u32 kFull = kSmemBarriers;
constexpr u32 kEmpty = kFull + 8 * kStages;
constexpr u32 kJobFull = kEmpty + 8 * kStages;
constexpr u32 kJobEmpty = kJobFull + 8;

// acc[64 x 128] (+)= A B, both in shared memory, the reduction along A's rows and across B's.
struct DqMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %72, 0;\n"
        "mov.b64 a, {%64, %73};\nmov.b64 b, {%68, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, p, 1, 1, 0, 1;\n"
        "mov.b64 a, {%65, %73};\nmov.b64 b, {%69, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%66, %73};\nmov.b64 b, {%70, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%67, %73};\nmov.b64 b, {%71, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 128] (+)= A B, both in shared memory, the reduction along A's rows and across B's.
struct RestMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %72, 0;\n"
        "mov.b64 a, {%64, %73};\nmov.b64 b, {%68, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, p, 1, 1, 0, 1;\n"
        "mov.b64 a, {%65, %73};\nmov.b64 b, {%69, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%66, %73};\nmov.b64 b, {%70, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%67, %73};\nmov.b64 b, {%71, %74};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, a, b, 1, 1, 1, 0, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// ---- the fragments
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

struct Params {
  TensorMap map_k;
  void* dq;
  long long dq_stride_row;
  long long dq_stride_head;
  long long dq_stride_batch;
  void* d_s;
  void* tile_counter;
  int tiles;
  int heads_q;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int q_tiles;
  int bottom_right;
  int kept_rows;
  int heads_before;
  float scale;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 256, "packed by the host");

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
// A tile of one axis, and the blocks of the other that it visits. A negative tile ends the work.
struct Job {
  int tile;
  int head;
  int batch;
  int block_begin;
  int block_end;
};
static_assert(sizeof(Job) <= kJobBytes);

// ---- scheduler: one thread that draws tiles, works out their blocks, and has what a tile keeps loaded; where a lane
// is kept, its whole warp fills rows of gradients that belong to no sequence, meanwhile
struct Scheduler {
  const Params& p;
  u32 smem;
  Job* slot;

  ATTNGEN_DEVICE void publish(int index) const {
    const TileOrder order = {p.q_tiles, p.heads_q, p.total_heads, p.heads_per_group, p.tail_rows};

    TileCoord tile = order.at<false>(index);
    // Of the heads that launches before this one have left.
    const int any_head = p.heads_before + tile.batch * p.heads_q + tile.head;
    tile.batch = any_head / p.heads_q;
    tile.head = any_head - tile.batch * p.heads_q;
    const Context ctx = tile_context(p, tile.batch, tile.head);
    const int first = tile.row_block * kTileM;
    const int last = min_of(first + kTileM, ctx.q_len) - 1;
    const BlockRange blocks = kv_block_range<kTileN>(mask_list(p), ctx, first, last);
    slot->tile = tile.row_block;
    slot->head = tile.head;
    slot->batch = tile.batch;
    slot->block_begin = blocks.begin;
    slot->block_end = blocks.end;
  }

  // Each tile draws one number, and where tiles are ordered each CTA one more; whoever draws the last leaves the counter
  // at zero.
  ATTNGEN_DEVICE int draw(int tiles) const {
    int* counter = static_cast<int*>(p.tile_counter);
    const int drawn = atomicAdd(counter, 1);
    if (drawn == tiles - 1) atomicExch(counter, 0);
    return drawn + gridDim.x;
  }

  // `load(job)` fetches the tile once its place is free.
  template <class Loader>
  ATTNGEN_DEVICE void run(Loader load) const {
    u32 parity = 1;
    int index = blockIdx.x;
    while (index < p.tiles) {
      publish(index);
      mbarrier_arrive(smem + kJobFull);
      load(*slot);
      parity ^= 1;
      mbarrier_wait(smem + kJobEmpty, parity);
      index = draw(p.tiles);
    }
    slot->tile = -1;
    mbarrier_arrive(smem + kJobFull);
  }
};

// Takes one thread through the tiles by `visit(job)` for each. The slot is released before it, or after it by the thread
// whose progress decides when the next tile is drawn.
template <bool kReleaseLate = false, class Visitor>
ATTNGEN_DEVICE void for_each_job(u32 smem, const volatile Job* slot, Visitor visit) {
  for (u32 parity = 0;; parity ^= 1) {
    mbarrier_wait(smem + kJobFull, parity);
    const Job job = {slot->tile, slot->head, slot->batch, slot->block_begin, slot->block_end};
    if (job.tile < 0) break;
    if (!kReleaseLate) mbarrier_arrive(smem + kJobEmpty);
    visit(job);
    if (kReleaseLate) mbarrier_arrive(smem + kJobEmpty);
  }
}

// ---- loader: blocks of keys with their dS
struct BlockLoader {
  const Params& p;
  u32 smem;
  const volatile Job* slot;

  ATTNGEN_DEVICE void run() const {
    RingPosition<kStages> ring;
    for_each_job(smem, slot, [&](const Job& job) {
      const int first_row = kv_sequence(p).first_row(job.batch);
      const auto index = kv_sequence(p).batch_index(job.batch);
      const int blocks = ceil_div(kv_sequence(p).length(job.batch), kTileN);
      const char* d_s = static_cast<const char*>(p.d_s) + (((static_cast<long long>(job.batch) * p.heads_q + job.head - p.heads_before) * blocks) * p.kept_rows + job.tile * kTileM) * 128;
#pragma unroll 1
      for (int block = job.block_begin; block < job.block_end; ++block) {
        const u32 full = smem + kFull + ring.stage * 8;
        mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1);
        mbarrier_arrive_expect(full, kKeyBytes + kQueryBoxBytes);
        bulk_load(smem + kSmemDs + ring.stage * kQueryBoxBytes, d_s + static_cast<long long>(block) * p.kept_rows * 128, kQueryBoxBytes, full);
#pragma unroll
        for (int box = 0; box < kQkBoxes; ++box) {
          tma_load(smem + kSmemK + ring.stage * kKeyBytes + box * kKeyBoxBytes, &p.map_k, full, box * 64, first_row + block * kTileN, job.head / p.group_size, index, kEvictLast);
        }
        ring.advance();
      }
    });
  }
};

// ---- consumer: 64 queries
struct Consumer {
  const Params& p;
  u32 smem;
  int warpgroup;
  int warp;
  int lane;
  RingPosition<kStages> ring;
  RingPosition<kStages> read_ring;

  ATTNGEN_DEVICE void release() {
    if (lane == 0) mbarrier_arrive(smem + kEmpty + read_ring.stage * 8);
    read_ring.advance();
  }
  ATTNGEN_DEVICE void run_tile(const Job& job) {
    float dq[DqMma::kN / 2];
#pragma unroll
    for (float& x : dq) x = 0.f;
    float rest[RestMma::kN / 2];  // columns from the 128th on
#pragma unroll
    for (float& x : rest) x = 0.f;
#pragma unroll 1
    for (int block = job.block_begin; block < job.block_end; ++block) {
      mbarrier_wait(smem + kFull + ring.stage * 8, ring.parity);
      const u32 d_s = smem + kSmemDs + ring.stage * kQueryBoxBytes + warpgroup * kWarpgroupBytes;
      const u32 keys = smem + kSmemK + ring.stage * kKeyBytes;
      gemm_shared_across<DqMma, kTileN / 16, kQueryBoxBytes, kKeyBoxBytes, true>(dq, d_s, keys);
      gemm_shared_across<RestMma, kTileN / 16, kQueryBoxBytes, kKeyBoxBytes, true>(rest, d_s, keys + DqMma::kN / 64 * kKeyBoxBytes);
      ring.advance();
      wgmma_wait<2>();
      if (block > job.block_begin) release();
    }
    wgmma_wait<0>();
    settle(dq);
    settle(rest);
    if (job.block_begin < job.block_end) release();
    const int row = job.tile * kTileM + warpgroup * 64 + warp * 16 + lane / 4;
    char* first = static_cast<char*>(p.dq) + 2 * (static_cast<long long>(job.batch) * p.dq_stride_batch + static_cast<long long>(job.head) * p.dq_stride_head + static_cast<long long>(row) * p.dq_stride_row);
    const int rows = q_sequence(p).length(job.batch) - row;
    store_whole_rows<Element, DqMma::kN>(first, 2 * p.dq_stride_row, rows, dq, p.scale, p.scale, lane);
    store_whole_rows<Element, RestMma::kN>(first + 2 * DqMma::kN, 2 * p.dq_stride_row, rows, rest, p.scale, p.scale, lane);
  }
  ATTNGEN_DEVICE void run(const volatile Job* slot) {
    for_each_job(smem, slot, [&](const Job& job) { run_tile(job); });
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(512, 1)
sm90_bwd_dq_kept__full_d256_bf16__3db4a1(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  Job* slot = reinterpret_cast<Job*>(shared + kSmemJob);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kFull + i * 8, 1);
      mbarrier_init(smem + kEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 1);  // consumer threads, the loader
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot}.run([](const Job&) {});
    if (threadIdx.x == 32) BlockLoader{p, smem, slot}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, static_cast<int>(threadIdx.x % 128 / 32), static_cast<int>(threadIdx.x % 32)}.run(slot);
  }
}
