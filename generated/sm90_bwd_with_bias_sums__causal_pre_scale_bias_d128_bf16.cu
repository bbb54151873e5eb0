// sm90_bwd_with_bias_sums__causal_pre_scale_bias_d128_bf16__a1fca9
// Rendered by attngen from kernels/wgmma/backward/fused.cu.j2; do not edit.
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
#include "attngen/softmax/transposed.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
using Element = Bf16;

// ---- the plan
constexpr int kTileM = 64;
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
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemDo = 32768;
constexpr u32 kSmemK = 65536;
constexpr u32 kSmemV = 98304;
constexpr u32 kSmemDs = 131072;
constexpr u32 kSmemDq = 163840;
constexpr u32 kSmemBias = 196608;
constexpr u32 kSmemLse = 212992;
constexpr u32 kSmemD = 213504;
constexpr u32 kSmemBarriers = 214016;
constexpr u32 kSmemJob = 214224;
constexpr u32 kJobBytes = 20;
constexpr int kQStages = 2;
constexpr int kDoStages = 2;
constexpr int kDsStages = 2;
constexpr u32 kRowBytes = kTileM * 4;  // one float a query
// Columns of dQ that a warpgroup holds in 64 rows: a share.
constexpr int kDqColumns = 64;
constexpr u32 kDqBytes = 64 * kDqColumns * 4;

constexpr u32 kKFull = kSmemBarriers;
constexpr u32 kVFull = kKFull + 8;
constexpr u32 kKEmpty = kVFull + 8;
constexpr u32 kVEmpty = kKEmpty + 8;
constexpr u32 kQFull = kVEmpty + 8;
constexpr u32 kQEmpty = kQFull + 8 * kQStages;
constexpr u32 kDoFull = kQEmpty + 8 * kQStages;
constexpr u32 kDoEmpty = kDoFull + 8 * kDoStages;
constexpr u32 kDqFull = kDoEmpty + 8 * kDoStages;
constexpr u32 kDqEmpty = kDqFull + 8 * 2 * kConsumers;
constexpr u32 kDsFull = kDqEmpty + 8 * kConsumers;
constexpr u32 kDsEmpty = kDsFull + 8 * kDsStages;
constexpr u32 kJobFull = kDsEmpty + 8 * kDsStages;
constexpr u32 kJobEmpty = kJobFull + 8;
constexpr u32 kTileFull = kJobEmpty + 8;
constexpr u32 kTileEmpty = kTileFull + 8;

// Named barriers: 0 is __syncthreads, then all consumers, then one a consumer.
constexpr u32 kConsumersBarrier = 1;
constexpr u32 kWarpgroupBarrier = 2;
constexpr u32 kTurnBarrier = 2 + kConsumers;

// acc[64 x 64] (+)= A B^T, both in shared memory, the reduction along A's rows and along B's.
struct ScoreMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[8], const u32 (&b)[8], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %48, 0;\n"
        "mov.b64 a, {%32, %49};\nmov.b64 b, {%40, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1, 0, 0;\n"
        "mov.b64 a, {%33, %49};\nmov.b64 b, {%41, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%34, %49};\nmov.b64 b, {%42, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%35, %49};\nmov.b64 b, {%43, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%36, %49};\nmov.b64 b, {%44, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%37, %49};\nmov.b64 b, {%45, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%38, %49};\nmov.b64 b, {%46, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%39, %49};\nmov.b64 b, {%47, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 128] (+)= A B, A in registers, B in shared memory with the reduction across its rows.
struct DvMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[16], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %84, 0;\n"
        "mov.b64 b, {%80, %85};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, b, p, 1, 1, 1;\n"
        "mov.b64 b, {%81, %85};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%68, %69, %70, %71}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%82, %85};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%72, %73, %74, %75}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%83, %85};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%76, %77, %78, %79}, b, 1, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

using DkMma = DvMma;
// acc[64 x 64] (+)= A B, both in shared memory, the reduction along A's rows and across B's.
struct DqMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[8], const u32 (&b)[8], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %48, 0;\n"
        "mov.b64 a, {%32, %49};\nmov.b64 b, {%40, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1, 0, 1;\n"
        "mov.b64 a, {%33, %49};\nmov.b64 b, {%41, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%34, %49};\nmov.b64 b, {%42, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%35, %49};\nmov.b64 b, {%43, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%36, %49};\nmov.b64 b, {%44, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%37, %49};\nmov.b64 b, {%45, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%38, %49};\nmov.b64 b, {%46, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "mov.b64 a, {%39, %49};\nmov.b64 b, {%47, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
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
  TensorMap map_dk;
  TensorMap map_dv;
  TensorMap map_bias;
  void* lse_log2;
  void* d;
  void* dq_acc;
  void* tile_counter;
  void* turns;
  void* row_sums;
  void* dbias;
  void* lse;
  int tiles;
  int kv_blocks;
  int q_blocks;
  int heads_q;
  int heads_kv;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  int dbias_columns;
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
static_assert(sizeof(Params) == 1088, "packed by the host");

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
    const TileOrder order = {p.kv_blocks, p.heads_kv, p.total_heads, p.heads_per_group, p.tail_rows, p.bias_stride_batch == 0 && p.bias_stride_head != 0};

    const TileCoord tile = order.at<false>(index);
    const Context ctx = tile_context(p, tile.batch, tile.head * p.group_size);
    const int first = tile.row_block * kTileN;
    const int last = min_of(first + kTileN, ctx.kv_len) - 1;
    const BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, last);
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

using ScoreTile = TileStage<kTileM, 64>;  // a warpgroup's keys of a block
// Brings the part of the tensor that scores read of a block of queries and the tile's keys.
struct ScoreTileLoader {
  const Params& p;
  u32 smem;
  u32 parity = 1;

  ATTNGEN_DEVICE void load(int batch, int head, int block, int tile) {
    if (!tile_boxed(p)) return;
    mbarrier_wait(smem + kTileEmpty, parity);
    parity ^= 1;
    mbarrier_arrive_expect(smem + kTileFull, kTileN / 64 * ScoreTile::kBytes);
#pragma unroll
    for (int part = 0; part < kTileN / 64; ++part) {
      ScoreTile{smem + kSmemBias + part * ScoreTile::kBytes}.load(&p.map_bias, smem + kTileFull, p.bias_stride_row ? block * kTileM : 0, tile * kTileN + part * 64, head, batch);
    }
  }
};
// Visits blocks of queries for the query heads of a tile's group.
template <class Visitor>
ATTNGEN_DEVICE void for_each_block(const Params& p, const Job& job, Visitor visit) {
  const int first_head = job.head * p.group_size;
#pragma unroll 1
  for (int member = 0; member < p.group_size; ++member) {
#pragma unroll 1
    for (int block = job.block_begin; block < job.block_end; ++block) visit(first_head + member, block);
  }
}

// Loads a float a query of a block, from a workspace.
ATTNGEN_DEVICE void load_row(u32 place, const void* workspace, long long at, u32 full) { bulk_load(place, static_cast<const float*>(workspace) + at, kRowBytes, full); }

// ---- loaders: the tile's keys and values, by the scheduler's thread
struct KvLoader {
  const Params& p;
  u32 smem;
  u32 parity = 1;

  ATTNGEN_DEVICE void operator()(const Job& job) {
    const int row = kv_sequence(p).first_row(job.batch) + job.tile * kTileN;
    const auto batch = kv_sequence(p).batch_index(job.batch);
    mbarrier_wait(smem + kKEmpty, parity);
    mbarrier_arrive_expect(smem + kKFull, kQkBoxes * kKeyBoxBytes);
    KvFetch::load<kQkBoxes>(smem + kSmemK, kKeyBoxBytes, &p.map_k, smem + kKFull, row, job.head, batch, kEvictFirst);
    mbarrier_wait(smem + kVEmpty, parity);
    mbarrier_arrive_expect(smem + kVFull, kVBoxes * kKeyBoxBytes);
    KvFetch::load<kVBoxes>(smem + kSmemV, kKeyBoxBytes, &p.map_v, smem + kVFull, row, job.head, batch, kEvictFirst);
    parity ^= 1;
  }
};

// Loads the blocks of queries, by a thread of its own.
struct QueryLoader {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  RingPosition<kQStages> q_ring;
  RingPosition<kDoStages> do_ring;
  ScoreTileLoader score_tiles = {p, smem};

  // Loads queries with their LSE, unless consumers make it, and with D where output gradients are freed early.
  ATTNGEN_DEVICE void load_queries(int row, int head, int batch, long long at, int visit) {
    const bool made_here = visit >= 0;
    const u32 q_full = smem + kQFull + q_ring.stage * 8;
    mbarrier_wait(smem + kQEmpty + q_ring.stage * 8, q_ring.parity ^ 1);
    mbarrier_arrive_expect(q_full, kQkBoxes * kQueryBoxBytes + (made_here ? 0 : kRowBytes));
    TmaFetch::load<kQkBoxes>(smem + kSmemQ + q_ring.stage * kQkBoxes * kQueryBoxBytes, kQueryBoxBytes, &p.map_q, q_full, row, head, batch, kEvictLast);
    if (!made_here) load_row(smem + kSmemLse + q_ring.stage * kRowBytes, p.lse_log2, at, q_full);
    q_ring.advance();
  }
  // Loads output gradients, with their D where consumers do not make it and queries do not bring it.
  ATTNGEN_DEVICE void load_output_gradients(int row, int head, int batch, long long at, int visit) {
    const bool made_here = visit >= 0;
    mbarrier_wait(smem + kDoEmpty + do_ring.stage * 8, do_ring.parity ^ 1);
    const u32 do_full = smem + kDoFull + do_ring.stage * 8;
    mbarrier_arrive_expect(do_full, kVBoxes * kQueryBoxBytes + (made_here ? 0 : kRowBytes));
    TmaFetch::load<kVBoxes>(smem + kSmemDo + do_ring.stage * kVBoxes * kQueryBoxBytes, kQueryBoxBytes, &p.map_d_o, do_full, row, head, batch, kEvictLast);
    if (!made_here) load_row(smem + kSmemD + do_ring.stage * kRowBytes, p.d, at, do_full);
    do_ring.advance();
  }
  ATTNGEN_DEVICE void load(const Job& job, int head, int block) {
    const int row = q_sequence(p).first_row(job.batch) + block * kTileM;
    const auto batch = q_sequence(p).batch_index(job.batch);
    const long long at = workspace_block(p, job.batch, head, block) * kTileM;
    constexpr int visit = -1;
    load_queries(row, head, batch, at, visit);
    load_output_gradients(row, head, batch, at, visit);
    score_tiles.load(job.batch, head, block, job.tile);
  }

  ATTNGEN_DEVICE void run() {
    await_dependency();
    for_each_job<true>(smem, slot, [&](const Job& job) {
      for_each_block(p, job, [&](int head, int block) { load(job, head, block); });
    });
  }
};

// ---- reducers: two threads that sum dQ in the float32 workspace, every other block each, so that one's
// additions may still be on their way when the other starts. The tile that comes first to a block of
// queries stores its part there, and others add theirs; where the last one's consumers join theirs
// with the sums, these come back for that, and what goes to memory is dQ.
struct Reducer {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  u32 turn;

  ATTNGEN_DEVICE void add(const Job& job, int head, int block, u32 parity) const {
    const long long at = workspace_block(p, job.batch, head, block);
    float* target = static_cast<float*>(p.dq_acc) + at * (kConsumers * kDqBytes / 4);
    int* turns = static_cast<int*>(p.turns) + at;
    const u32 full = smem + kDqFull + turn * kConsumers * 8;
    // A tile claims the first turn, 1, with its part at hand, and waits for nobody then. Mostly the
    // sums are there, 2, which is known before this tile's part is.
    bool first = false;
    if (!has_count(turns, 2)) {
      mbarrier_wait(full, parity);
      first = claim(turns);
      if (!first) await_count(turns, 2);
    }
#pragma unroll
    for (u32 part = 0; part < kConsumers; ++part) {
      mbarrier_wait(full + part * 8, parity);
      float* sums = target + part * (kDqBytes / 4);
      const u32 source = smem + kSmemDq + part * kDqBytes;
      if (first) {
        bulk_store(sums, source, kDqBytes);
      } else {
        bulk_add(sums, source, kDqBytes);
      }
      tma_store_commit();
      tma_store_wait_read();
      mbarrier_arrive(smem + kDqEmpty + part * 8);
    }
    if (first) {
      tma_store_wait();
      count_up(turns);
    }
  }

  ATTNGEN_DEVICE void run() const {
    await_dependency();
    RingPosition<2> ring;
    for_each_job(smem, slot, [&](const Job& job) {
      for_each_block(p, job, [&](int head, int block) {
        if (ring.stage == turn) add(job, head, block, ring.parity);
        ring.advance();
      });
    });
    tma_store_wait();
  }
};

// ---- consumer: 64 keys
struct Consumer {
  const Params& p;
  u32 smem;
  int warpgroup;
  int warp;
  int lane;
  RingPosition<kQStages> q_ring;
  RingPosition<kDoStages> do_ring;
  RingPosition<kDsStages> ds_ring;
  RingPosition<kDsStages> ds_read;
  u32 tile_parity = 0;
  float key_gradients[2];  // sums of gradients of the scores of the thread's keys

  using Scores = float[kTileM / 2];
  using Dq = float[kDqColumns / 2];
  struct Gradients {
    float dk[DkMma::kN / 2];
    float dv[DvMma::kN / 2];
  };

  ATTNGEN_DEVICE u32 keys() const { return smem + kSmemK + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 values() const { return smem + kSmemV + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 queries() const { return smem + kSmemQ + q_ring.stage * kQkBoxes * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 output_gradients() const { return smem + kSmemDo + do_ring.stage * kVBoxes * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 score_gradients(const RingPosition<kDsStages>& ring) const { return smem + kSmemDs + ring.stage * kConsumers * kQueryBoxBytes; }
  // Where the thread's first two of a block's LSE or D lie.
  ATTNGEN_DEVICE u32 query_row(u32 region, u32 stage) const { return smem + region + stage * kRowBytes + (lane & 3) * 8; }

  ATTNGEN_DEVICE void hide(Scores& scores, const Context& ctx, int key, int block) const {
    hide_queries<kTileM>(scores, mask_list(p), ctx, key, block * kTileM + (lane & 3) * 2);
  }

  ATTNGEN_DEVICE ScoreTile score_tile() const { return {smem + kSmemBias + warpgroup * ScoreTile::kBytes}; }
  // Awaits what the scores of a block read; a warp copies its own part of what the copy engine cannot.
  ATTNGEN_DEVICE void await_score_tile(const Context& ctx, int key, int block) {
    if (tile_boxed(p)) {
      mbarrier_wait(smem + kTileFull, tile_parity);
      tile_parity ^= 1;
    } else {
      __syncwarp();
      score_tile().template copy<2>(tile_source(p, ctx), block * kTileM, key - lane / 4, lane, 2 * warp);
      await_copies();
      __syncwarp();
    }
  }
  ATTNGEN_DEVICE void take_score_pairs(u32* pairs, int group) const {
    const bool one_row = p.bias_stride_row == 0;
    score_tile().take_transposed(pairs, one_row ? 0 : 16 * group + (lane >> 4) * 8 + (lane & 7), 2 * warp, lane);
  }
  // Every thread arrives, since it has what it took.
  ATTNGEN_DEVICE void release_score_tile() const {
    if (tile_boxed(p)) mbarrier_arrive(smem + kTileEmpty);
  }

  // S^T starts with what the scores add.
  ATTNGEN_DEVICE void start_scores(Scores& scores, const Context& ctx, int key, int block) {
    const ScoreList list = score_list(p, ctx, p.scale);
    await_score_tile(ctx, key, block);
    const int query = block * kTileM + (lane & 3) * 2;
    const float distance[2] = {static_cast<float>(key - ctx.delta - query), static_cast<float>(key + 8 - ctx.delta - query)};
#pragma unroll
    for (int i = 0; i < kTileM / 2; i += 8) {
      u32 pairs[4];
      take_score_pairs(pairs, i / 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int step = fragment_column(i + k);
        const int half = fragment_row(i + k);
        const float2 pair = Element::unpack(pairs[k / 2]);
        const ScoreList::At at = {query + step, key + half * 8, distance[half], static_cast<float>(-step), list.tile_value(k % 2 ? pair.y : pair.x)};
        scores[i + k] = list.apply(ctx, 0.f, at);
      }
    }
    settle(scores);
  }

  // S^T becomes P^T.
  ATTNGEN_DEVICE void weigh(Scores& scores) const {
    weigh_queries<kTileM>(scores, p.scale_log2, query_row(kSmemLse, q_ring.stage));
  }

  // Whether the block at hand has rows whose LSE shows no sum; weights of these are made of scores anew, without a bias.
  ATTNGEN_DEVICE bool has_large_rows() const {
    bool large = false;
#pragma unroll
    for (int i = 0; i < kTileM; i += 64) {
      if (i + lane * 2 >= kTileM) continue;
      const float2 lse = load_shared_pair(smem + kSmemLse + q_ring.stage * kRowBytes + (i + lane * 2) * 4);
      large = large || lse.x == -kInfinity || lse.y == -kInfinity;
    }
    return __any_sync(~0u, large);
  }

  ATTNGEN_DEVICE void remake_scores(Scores& scores) const {
    gemm_of_warp<Element, kTileM, kQkSteps, kKeyBoxBytes, kQueryBoxBytes>(scores, keys(), queries(), forget(warp), lane_id());
  }
  ATTNGEN_DEVICE void weigh_large_rows(Scores& scores, const Context& ctx, int key, int block) const {
    const int first = block * kTileM + (lane & 3) * 2;
    replace_pairs(scores, nullptr, [&](int i, float& one, float& other) -> u32 {
      const int query = first + fragment_column(i);
      const int j = key + fragment_row(i) * 8;
      const float2 references[2] = {reference_of(p, ctx, query), reference_of(p, ctx, query + 1)};
      float derivatives[2] = {1.f, 1.f};
      const auto weigh_one = [&](float product, int n) {
        if (product == -kInfinity || references[n].x == kInfinity) return 0.f;
        return weight_beside(scaled_score(p, ctx, query + n, j, product), references[n]);
      };
      one = weigh_one(one, 0);
      other = weigh_one(other, 1);
      return Element::pack(one * derivatives[0], other * derivatives[1]);
    });
  }

  // Starts dP^T at -D, so that dS^T = P^T (dP^T - D) is one product.
  ATTNGEN_DEVICE void start_gradients(Scores& gradients) const {
    const u32 d = query_row(kSmemD, do_ring.stage);
#pragma unroll
    for (int i = 0; i < kTileM / 2; i += 4) {
      const float2 mean = load_shared_pair(d + i * 8);
      gradients[i] = gradients[i + 2] = -mean.x;
      gradients[i + 1] = gradients[i + 3] = -mean.y;
    }
    settle(gradients);  // no copy of them may sink behind the product issued next
  }

  ATTNGEN_DEVICE void hand_over_dq(const Dq& dq) {
    static_assert(kDsStages == 2, "dS just read lay in the other stage");
    const u32 dq_turn = ds_read.stage ^ 1;  // which reducer's
    mbarrier_wait(smem + kDqEmpty + warpgroup * 8, dq_turn ^ 1);
    const u32 part = smem + kSmemDq + warpgroup * kDqBytes + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < kDqColumns / 2; i += 4) store_shared_x4(part + i * 512, dq + i);
    fence_async_shared();
    __syncwarp();
    // Every thread arrives where tiles complete dQ: rows in 16 bits are no thread's own.
    if (lane == 0) mbarrier_arrive(smem + kDqFull + (dq_turn * kConsumers + warpgroup) * 8);
  }

  // The products of one warpgroup run under the other's arithmetic: each takes its turn.
  ATTNGEN_DEVICE void await_turn() const { named_barrier_sync(kTurnBarrier + warpgroup, 256); }
  ATTNGEN_DEVICE void pass_turn() const { named_barrier_arrive(kTurnBarrier + (warpgroup + 1) % kConsumers, 256); }

  // Issues the products of dQ of the block before this one, once every warpgroup's dS is there.
  ATTNGEN_DEVICE void issue_dq(Dq& dq) {
    mbarrier_wait(smem + kDsFull + ds_read.stage * 8, ds_read.parity);
    gemm_shared_across<DqMma, kTileN / 16, kQueryBoxBytes, kKeyBoxBytes>(dq, dq_rows(), dq_keys());
  }
  // Frees dS of the block before, which has been read now that dQ is there.
  ATTNGEN_DEVICE void release_ds(Dq& dq) {
    settle(dq);
    if (lane == 0) mbarrier_arrive(smem + kDsEmpty + ds_read.stage * 8);
    ds_read.advance();
  }
  ATTNGEN_DEVICE void finish_dq(Dq& dq) {
    release_ds(dq);
    hand_over_dq(dq);
  }
  ATTNGEN_DEVICE void issue_dk(Gradients& sums, const u32 (&packed_gradients)[kTileM / 4]) const {
    gemm_accumulate<DkMma, kTileM / 16, kQueryBoxBytes>(sums.dk, packed_gradients, queries());
  }

  // Works on one block of queries. Its dQ waits for the next block: by then the other warpgroups have laid
  // down their dS, and nobody waits for anybody.
  ATTNGEN_DEVICE void step(Gradients& sums, const Context& ctx, int key, int block, bool masked, bool first) {
    Scores scores;
    Scores gradients;
    u32 packed_weights[kTileM / 4];
    u32 packed_gradients[kTileM / 4];
    mbarrier_wait(smem + kDoFull + do_ring.stage * 8, do_ring.parity);
    start_gradients(gradients);
    start_scores(scores, ctx, key, block);
    mbarrier_wait(smem + kQFull + q_ring.stage * 8, q_ring.parity);
    gemm_shared_shared<ScoreMma, kQkSteps, kKeyBoxBytes, kQueryBoxBytes, true>(scores, keys(), queries());
    gemm_shared_shared<ScoreMma, kVSteps, kKeyBoxBytes, kQueryBoxBytes, true>(gradients, values(), output_gradients());
    release_score_tile();
    wgmma_wait<1>();
    settle(scores);
    const bool large = has_large_rows();
    if (large) remake_scores(scores);
    if (masked) hide(scores, ctx, key, block);
    if (large) {
      weigh_large_rows(scores, ctx, key, block);
    } else {
      weigh(scores);
    }
    pack_pairs<Element, kTileM / 2>(packed_weights, scores);
    wgmma_wait<0>();
    settle(gradients);
    const u32 ds_box = score_gradients(ds_ring) + warpgroup * kQueryBoxBytes;
    mbarrier_wait(smem + kDsEmpty + ds_ring.stage * 8, ds_ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kTileM / 2; i += 8) {  // 16 queries at a time keep the registers few
#pragma unroll
      for (int k = i; k < i + 8; ++k) gradients[k] *= scores[k];
#pragma unroll
      for (int k = i; k < i + 8; ++k) key_gradients[fragment_row(k)] += gradients[k];
      pack_pairs<Element, 8>(packed_gradients + i / 2, gradients + i);
      stage_transposed(ds_box, i / 8, packed_gradients + i / 2, warp, lane);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kDsFull + ds_ring.stage * 8);
    await_turn();
    gemm_accumulate<DvMma, kTileM / 16, kQueryBoxBytes>(sums.dv, packed_weights, output_gradients());
    if (first) {
      pass_turn();
      issue_dk(sums, packed_gradients);
    } else {
      Dq dq;
      issue_dq(dq);
      pass_turn();
      issue_dk(sums, packed_gradients);
      wgmma_wait<1>();
      finish_dq(dq);
    }
    wgmma_wait<0>();
    release_block();
  }
  // Every thread arrives: each has read D and the LSE itself.
  ATTNGEN_DEVICE void release_block() {
    mbarrier_arrive(smem + kDoEmpty + do_ring.stage * 8);
    mbarrier_arrive(smem + kQEmpty + q_ring.stage * 8);
    q_ring.advance();
    do_ring.advance();
    ds_ring.advance();
  }

  // This warpgroup's part of dQ: all queries, some boxes of columns.
  ATTNGEN_DEVICE u32 dq_rows() const { return score_gradients(ds_read); }
  ATTNGEN_DEVICE u32 dq_keys() const { return smem + kSmemK + warpgroup * (kDqColumns / 64) * kKeyBoxBytes; }

  // The gradients of the tile before have been read where they were staged.
  ATTNGEN_DEVICE void await_stores() const {
    if (warp == 0 && lane == 0) tma_store_wait_read();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  }
  // Stores 64 rows of a gradient.
  template <int kBoxes, u32 kBoxBytes>
  ATTNGEN_DEVICE void store(u32 tile, const TensorMap* map, const Job& job) const {
    const int row = kv_sequence(p).first_row(job.batch) + job.tile * kTileN + warpgroup * 64;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      tma_store(map, tile + box * kBoxBytes, box * 64, row, job.head, kv_sequence(p).batch_index(job.batch));
    }
  }
  // Stores both gradients: dK by way of where dS was, dV from where it is staged. Keys are read no more.
  ATTNGEN_DEVICE void leave(const Gradients& sums, u32 dv_tile, const Job& job) const {
    if (lane == 0) mbarrier_arrive(smem + kKEmpty);
    named_barrier_sync(kConsumersBarrier, kConsumers * 128);  // every warpgroup's dQ has read dS
    const u32 dk_tile = smem + kSmemDs + warpgroup * kQueryBoxBytes;
    constexpr u32 kDkBoxBytes = kConsumers * kQueryBoxBytes;
    static_assert(kQkBoxes <= kDsStages && kTileM >= 64, "room for dK");
    stage_rows<Element, DkMma::kN, kDkBoxBytes>(dk_tile, sums.dk, p.scale, warp, lane);
    fence_async_shared();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (warp == 0 && lane == 0) {
      store<kVBoxes, kKeyBoxBytes>(dv_tile, &p.map_dv, job);
      store<kQkBoxes, kDkBoxBytes>(dk_tile, &p.map_dk, job);
      tma_store_commit();
    }
  }

  // Where the gradient of the thread's first key lies in the sums of a query head.
  ATTNGEN_DEVICE float* bias_sums(const Context& ctx, int head, int key) const {
    return static_cast<float*>(p.dbias) + (static_cast<long long>(ctx.batch) * p.heads_q + head) * p.dbias_columns + key;
  }
  // The thread that has a key's sums: it alone writes them, in the order of its visits.
  ATTNGEN_DEVICE bool has_bias(int key) const { return lane % 4 == 0 && key < p.dbias_columns; }

  // Zeros the sums of a tile of all query heads of its group, to which its blocks add.
  ATTNGEN_DEVICE void clear_bias(const Context& ctx, int first_head, int key) const {
#pragma unroll 1
    for (int head = first_head; head < first_head + p.group_size; ++head) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (has_bias(key + half * 8)) bias_sums(ctx, head, key)[half * 8] = 0.f;
      }
    }
  }
  // Adds what the head at hand has by the keys of a tile, from whose sums it begins anew.
  ATTNGEN_DEVICE void leave_bias(const Context& ctx, int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_sum(key_gradients[half]) * p.scale;
      if (has_bias(key + half * 8)) atomicAdd(bias_sums(ctx, ctx.head, key) + half * 8, all);
      key_gradients[half] = 0.f;
    }
  }

  ATTNGEN_DEVICE void run_tile(const Job& job, u32 parity) {
    Context ctx = tile_context(p, job.batch, job.head * p.group_size);
    const int first = job.tile * kTileN + warpgroup * 64;
    const int last = min_of(first + 64, ctx.kv_len) - 1;
    BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, last);
    if (first + 64 > ctx.kv_len) blocks.full_end = job.block_begin;
    Gradients sums;
#pragma unroll
    for (int i = 0; i < DkMma::kN / 2; ++i) sums.dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < DvMma::kN / 2; ++i) sums.dv[i] = 0.f;
    mbarrier_wait(smem + kKFull, parity);
    mbarrier_wait(smem + kVFull, parity);
    const int key = first + warp * 16 + lane / 4;
    bool first_step = true;
    key_gradients[0] = key_gradients[1] = 0.f;
    clear_bias(ctx, job.head * p.group_size, key);
    for_each_block(p, job, [&](int head, int block) {
      if (head != ctx.head) leave_bias(ctx, key);
      ctx.head = head;
      step(sums, ctx, key, block, block < blocks.full_begin || block >= blocks.full_end, first_step);
      first_step = false;
    });
    leave_bias(ctx, key);
    const u32 dv_tile = values();
    if (first_step) {
      stage_rows<Element, DvMma::kN, kKeyBoxBytes>(dv_tile, sums.dv, 1.f, warp, lane);
    } else {
      Dq dq;
      issue_dq(dq);
      stage_rows<Element, DvMma::kN, kKeyBoxBytes>(dv_tile, sums.dv, 1.f, warp, lane);
      wgmma_wait<0>();
      finish_dq(dq);
    }
    leave(sums, dv_tile, job);
    await_stores();
    if (lane == 0) mbarrier_arrive(smem + kVEmpty);
  }

  ATTNGEN_DEVICE void run(const volatile Job* slot) {
    if (warpgroup == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 256);
    u32 parity = 0;
    for_each_job(smem, slot, [&](const Job& job) {
      run_tile(job, parity);
      parity ^= 1;
    });
    if (warp == 0 && lane == 0) tma_store_wait();
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(384, 1)
sm90_bwd_with_bias_sums__causal_pre_scale_bias_d128_bf16__a1fca9(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  Job* slot = reinterpret_cast<Job*>(shared + kSmemJob);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.map_q);
    tma_prefetch_map(&p.map_k);
    tma_prefetch_map(&p.map_v);
    tma_prefetch_map(&p.map_d_o);
    tma_prefetch_map(&p.map_dk);
    tma_prefetch_map(&p.map_dv);
    mbarrier_init(smem + kKFull, 1);
    mbarrier_init(smem + kVFull, 1);
    mbarrier_init(smem + kKEmpty, kConsumers * 4);
    mbarrier_init(smem + kVEmpty, kConsumers * 4);
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(smem + kQFull + i * 8, 1);
      mbarrier_init(smem + kQEmpty + i * 8, kConsumers * 128);
    }
    for (int i = 0; i < kDoStages; ++i) {
      mbarrier_init(smem + kDoFull + i * 8, 1);
      mbarrier_init(smem + kDoEmpty + i * 8, kConsumers * 128);
    }
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(smem + kDqFull + i * 8, 4);
      mbarrier_init(smem + kDqFull + (kConsumers + i) * 8, 4);
      mbarrier_init(smem + kDqEmpty + i * 8, 1);
    }
    for (int i = 0; i < kDsStages; ++i) {
      mbarrier_init(smem + kDsFull + i * 8, kConsumers * 4);
      mbarrier_init(smem + kDsEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kTileFull, 1);
    mbarrier_init(smem + kTileEmpty, kConsumers * 128);
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 3);  // consumer threads, loader, reducers
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot}.run(KvLoader{p, smem});
    if (threadIdx.x == 32) QueryLoader{p, smem, slot}.run();
    if (threadIdx.x == 64 || threadIdx.x == 96) Reducer{p, smem, slot, threadIdx.x / 32 % 2}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, static_cast<int>(threadIdx.x % 128 / 32), static_cast<int>(threadIdx.x % 32)}.run(slot);
  }
}
