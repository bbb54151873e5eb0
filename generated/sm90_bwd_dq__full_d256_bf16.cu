// sm90_bwd_dq__full_d256_bf16__e93408
// Rendered by attngen from kernels/wgmma/backward/dq.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/stage.cuh"
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
constexpr int kTileM = 128;
constexpr int kTileN = 64;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kQkSteps = (kHeadDimQk + 15) / 16;
constexpr int kVSteps = (kHeadDimV + 15) / 16;
constexpr int kQkBoxes = (kHeadDimQk + 63) / 64;
constexpr int kVBoxes = (kHeadDimV + 63) / 64;
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemDo = 65536;
constexpr u32 kSmemK = 131072;
constexpr u32 kSmemV = 196608;
constexpr u32 kSmemBarriers = 229376;
constexpr u32 kSmemJob = 229456;
constexpr u32 kJobBytes = 20;
constexpr int kKStages = 2;
constexpr int kVStages = 1;
constexpr int kRowBlock = 48;  // queries a block of the workspaces

constexpr u32 kQFull = kSmemBarriers;
constexpr u32 kQEmpty = kQFull + 8;
constexpr u32 kKFull = kQEmpty + 8;
constexpr u32 kKEmpty = kKFull + 8 * kKStages;
constexpr u32 kVFull = kKEmpty + 8 * kKStages;
constexpr u32 kVEmpty = kVFull + 8 * kVStages;
constexpr u32 kJobFull = kVEmpty + 8 * kVStages;
constexpr u32 kJobEmpty = kJobFull + 8;

// Named barriers: 0 is __syncthreads, then one a consumer for its turn, one for its epilogue.
constexpr u32 kTurnBarrier = 1;
constexpr u32 kWarpgroupBarrier = 1 + kConsumers;

// acc[64 x 64] (+)= A B^T, both in shared memory, the reduction along A's rows and along B's.
struct ScoreMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[16], const u32 (&b)[16], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %64, 0;\n"
        "mov.b64 a, {%32, %65};\nmov.b64 b, {%48, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1, 0, 0;\n"
        "mov.b64 a, {%33, %65};\nmov.b64 b, {%49, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%34, %65};\nmov.b64 b, {%50, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%35, %65};\nmov.b64 b, {%51, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%36, %65};\nmov.b64 b, {%52, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%37, %65};\nmov.b64 b, {%53, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%38, %65};\nmov.b64 b, {%54, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%39, %65};\nmov.b64 b, {%55, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%40, %65};\nmov.b64 b, {%56, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%41, %65};\nmov.b64 b, {%57, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%42, %65};\nmov.b64 b, {%58, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%43, %65};\nmov.b64 b, {%59, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%44, %65};\nmov.b64 b, {%60, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%45, %65};\nmov.b64 b, {%61, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%46, %65};\nmov.b64 b, {%62, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%47, %65};\nmov.b64 b, {%63, %66};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1, 0, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(b[8]), "r"(b[9]), "r"(b[10]), "r"(b[11]), "r"(b[12]), "r"(b[13]), "r"(b[14]), "r"(b[15]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 256] (+)= A B, A in registers, B in shared memory with the reduction across its rows.
struct DqMma {
  static constexpr int kN = 256;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[128], const u32 (&a)[16], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %148, 0;\n"
        "mov.b64 b, {%144, %149};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, b, p, 1, 1, 1;\n"
        "mov.b64 b, {%145, %149};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%132, %133, %134, %135}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%146, %149};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%136, %137, %138, %139}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%147, %149};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%140, %141, %142, %143}, b, 1, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]), "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79]), "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]), "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]), "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]), "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]), "+f"(acc[111]), "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]), "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]), "+f"(acc[121]), "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]), "+f"(acc[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
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
  TensorMap map_q;
  TensorMap map_k;
  TensorMap map_v;
  TensorMap map_d_o;
  TensorMap map_dq;
  void* lse_log2;
  void* d;
  void* tile_counter;
  int tiles;
  int q_blocks;
  int heads_q;
  int heads_kv;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  int q_tiles;
  float scale;
  float scale_log2;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 768, "packed by the host");

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
    const TileOrder order = {p.q_tiles, p.heads_q, p.total_heads, p.heads_per_group, p.tail_rows};

    const TileCoord tile = order.at<false>(index);
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

// ---- loaders: the tile's queries and output gradients, by the scheduler's thread
struct QueryLoader {
  const Params& p;
  u32 smem;
  u32 parity = 1;

  ATTNGEN_DEVICE void operator()(const Job& job) {
    const int row = q_sequence(p).first_row(job.batch) + job.tile * kTileM;
    const auto batch = q_sequence(p).batch_index(job.batch);
    mbarrier_wait(smem + kQEmpty, parity);
    mbarrier_arrive_expect(smem + kQFull, (kQkBoxes + kVBoxes) * kQueryBoxBytes);
    TmaFetch::load<kQkBoxes>(smem + kSmemQ, kQueryBoxBytes, &p.map_q, smem + kQFull, row, job.head, batch, kEvictFirst);
    TmaFetch::load<kVBoxes>(smem + kSmemDo, kQueryBoxBytes, &p.map_d_o, smem + kQFull, row, job.head, batch, kEvictFirst);
    parity ^= 1;
  }
};

// The blocks of keys, or of values, by a thread of their own.
template <int kBoxes, int kStages, u32 kTiles, u32 kFull, u32 kEmpty>
struct BlockLoader {
  const Params& p;
  const TensorMap* map;
  u32 smem;
  const volatile Job* slot;

  ATTNGEN_DEVICE void run() const {
    RingPosition<kStages> ring;
    for_each_job(smem, slot, [&](const Job& job) {
      const int first_row = kv_sequence(p).first_row(job.batch);
      const auto index = kv_sequence(p).batch_index(job.batch);
#pragma unroll 1
      for (int block = job.block_begin; block < job.block_end; ++block) {
        const u32 full = smem + kFull + ring.stage * 8;
        mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1);
        mbarrier_arrive_expect(full, kBoxes * kKeyBoxBytes);
        KvFetch::load<kBoxes>(smem + kTiles + ring.stage * (kBoxes * kKeyBoxBytes), kKeyBoxBytes, map, full,
                              first_row + block * kTileN, job.head / p.group_size, index, kEvictLast);
        ring.advance();
      }
    });
  }
};
using KLoader = BlockLoader<kQkBoxes, kKStages, kSmemK, kKFull, kKEmpty>;
using VLoader = BlockLoader<kVBoxes, kVStages, kSmemV, kVFull, kVEmpty>;

// ---- consumer: 64 queries
struct Consumer {
  const Params& p;
  u32 smem;
  int warpgroup;
  int warp;
  int lane;
  RingPosition<kKStages> k_ring;
  RingPosition<kKStages> dq_ring;
  RingPosition<kVStages> v_ring;

  using Scores = float[kTileN / 2];
  // LSE (log2) and -D of the thread's two rows.
  struct Rows {
    float lse[2];
    float start[2];
  };

  ATTNGEN_DEVICE u32 queries() const { return smem + kSmemQ + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 output_gradients() const { return smem + kSmemDo + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 keys(const RingPosition<kKStages>& ring) const { return smem + kSmemK + ring.stage * kQkBoxes * kKeyBoxBytes; }
  ATTNGEN_DEVICE u32 values() const { return smem + kSmemV + v_ring.stage * kVBoxes * kKeyBoxBytes; }

  ATTNGEN_DEVICE void await_turn() const { named_barrier_sync(kTurnBarrier + warpgroup, 256); }
  ATTNGEN_DEVICE void pass_turn() const { named_barrier_arrive(kTurnBarrier + (warpgroup + 1) % kConsumers, 256); }

  ATTNGEN_DEVICE Rows load_rows(const Job& job, const Context& ctx, int row) const {
    const long long at = workspace_block(p, job.batch, job.head, 0) * kRowBlock;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = row + half * 8 < ctx.q_len;
      rows.lse[half] = inside ? static_cast<const float*>(p.lse_log2)[at + row + half * 8] : kInfinity;
      rows.start[half] = inside ? -static_cast<const float*>(p.d)[at + row + half * 8] : 0.f;
    }
    return rows;
  }

  // Makes dS of S and of dP - D.
  ATTNGEN_DEVICE void differentiate(Scores& scores, Scores& gradients, const Rows& rows, const Context& ctx, const BlockRange& blocks, int row, int block) const {
    if (block < blocks.full_begin || block >= blocks.full_end) {
      const MaskList masks = mask_list(p);
      const int column = block * kTileN + (lane & 3) * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Range range = masks.row_range(ctx, row + half * 8);
        hide_outside<kTileN>(scores, half, MaskList::kBoundsLeft ? range.lo - column : 0, range.hi - column);
      }
    }
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) scores[i] = exp2_approx(scores[i] * p.scale_log2 - rows.lse[fragment_row(i)]);
    wgmma_wait<0>();
    settle(gradients);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) gradients[i] *= scores[i];
  }

  // A turn at the tensor cores is about to begin.
  ATTNGEN_DEVICE void await_block(Scores& gradients, const Rows& rows) const {
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) gradients[i] = rows.start[fragment_row(i)];
    await_turn();
  }
  ATTNGEN_DEVICE void issue_products(Scores& scores, Scores& gradients) const {
    gemm_shared_shared<ScoreMma, kQkSteps, kQueryBoxBytes, kKeyBoxBytes>(scores, queries(), keys(k_ring));
    gemm_shared_shared<ScoreMma, kVSteps, kQueryBoxBytes, kKeyBoxBytes, true>(gradients, output_gradients(), values());
  }
  ATTNGEN_DEVICE void issue_dq(float (&dq)[kHeadDimQk / 2], const u32 (&packed)[kTileN / 4]) const {
    gemm_accumulate<DqMma, kTileN / 16, kKeyBoxBytes>(dq, packed, keys(dq_ring));
  }
  ATTNGEN_DEVICE void release_values() {
    if (lane == 0) mbarrier_arrive(smem + kVEmpty + v_ring.stage * 8);
    v_ring.advance();
  }
  ATTNGEN_DEVICE void release_keys() {
    if (lane == 0) mbarrier_arrive(smem + kKEmpty + dq_ring.stage * 8);
    dq_ring.advance();
  }

  ATTNGEN_DEVICE void store(const float (&dq)[kHeadDimQk / 2], const Job& job) const {
    stage_rows<Element, kHeadDimQk, kQueryBoxBytes>(queries(), dq, p.scale, warp, lane);
    fence_async_shared();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (warp == 0 && lane == 0) {
      const int row = q_sequence(p).first_row(job.batch) + job.tile * kTileM + warpgroup * 64;
#pragma unroll
      for (int box = 0; box < kQkBoxes; ++box) {
        tma_store(&p.map_dq, queries() + box * kQueryBoxBytes, box * 64, row, job.head, q_sequence(p).batch_index(job.batch));
      }
      tma_store_commit();
      tma_store_wait_read();
      mbarrier_arrive(smem + kQEmpty);
    }
  }

  ATTNGEN_DEVICE void run_tile(const Job& job, u32 parity) {
    const Context ctx = tile_context(p, job.batch, job.head);
    const int first = job.tile * kTileM + warpgroup * 64;
    const int row = first + warp * 16 + lane / 4;
    const BlockRange blocks = kv_block_range<kTileN>(mask_list(p), ctx, first, max_of(min_of(first + 64, ctx.q_len) - 1, first));
    const Rows rows = load_rows(job, ctx, row);
    float dq[kHeadDimQk / 2];
    Scores scores;
    Scores gradients;
    u32 packed[kTileN / 4];
#pragma unroll
    for (int i = 0; i < kHeadDimQk / 2; ++i) dq[i] = 0.f;
    mbarrier_wait(smem + kQFull, parity);
    // dQ is one block behind, and first in a turn, so that its keys' buffer is free soon. Branches, not
    // products before and behind the loop: code that stands once compiles in two thirds of the time.
#pragma unroll 1
    for (int block = job.block_begin;; ++block) {
      if (block < job.block_end) await_block(gradients, rows);
      if (block > job.block_begin) issue_dq(dq, packed);
      if (block >= job.block_end) break;
      issue_products(scores, gradients);
      pass_turn();
      wgmma_wait<1>();
      if (block > job.block_begin) release_keys();
      settle(scores);
      k_ring.advance();
      differentiate(scores, gradients, rows, ctx, blocks, row, block);
      release_values();
      pack_pairs<Element, kTileN / 2>(packed, gradients);
    }
    wgmma_wait<0>();
    if (job.block_begin < job.block_end) release_keys();
    store(dq, job);
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
sm90_bwd_dq__full_d256_bf16__e93408(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  Job* slot = reinterpret_cast<Job*>(shared + kSmemJob);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(smem + kQFull, 1);
    mbarrier_init(smem + kQEmpty, kConsumers);
    for (int i = 0; i < kKStages; ++i) {
      mbarrier_init(smem + kKFull + i * 8, 1);
      mbarrier_init(smem + kKEmpty + i * 8, kConsumers * 4);
    }
    for (int i = 0; i < kVStages; ++i) {
      mbarrier_init(smem + kVFull + i * 8, 1);
      mbarrier_init(smem + kVEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 2);  // consumer threads, loaders
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot}.run(QueryLoader{p, smem});
    if (threadIdx.x == 64) KLoader{p, &p.map_k, smem, slot}.run();
    if (threadIdx.x == 96) VLoader{p, &p.map_v, smem, slot}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, static_cast<int>(threadIdx.x % 128 / 32), static_cast<int>(threadIdx.x % 32)}.run(slot);
  }
}
