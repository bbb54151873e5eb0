// sm90_bwd_dkv__full_d256_bf16__d4c682
// Rendered by attngen from kernels/wgmma/backward/dkv.cu.j2; do not edit.
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
#include "attngen/softmax/transposed.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 256;
constexpr int kHeadDimV = 256;
using Element = Bf16;

// ---- the plan
constexpr int kTileM = 48;
constexpr int kTileN = 64;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
constexpr int kQkSteps = (kHeadDimQk + 15) / 16;
constexpr int kVSteps = (kHeadDimV + 15) / 16;
constexpr int kQkBoxes = (kHeadDimQk + 63) / 64;
constexpr int kVBoxes = (kHeadDimV + 63) / 64;
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemDo = 73728;
constexpr u32 kSmemK = 147456;
constexpr u32 kSmemV = 180224;
constexpr u32 kSmemWeights = 212992;
constexpr u32 kSmemLse = 225280;
constexpr u32 kSmemD = 225856;
constexpr u32 kSmemBarriers = 226432;
constexpr u32 kSmemJob = 226608;
constexpr u32 kJobBytes = 20;
constexpr int kStages = 3;  // of queries and of output gradients
constexpr int kQStages = kStages;
constexpr int kDoStages = kStages;
constexpr u32 kRowBytes = kTileM * 4;  // one float a query
constexpr int kHeld = 4;  // steps of a tile's rows that consumers have in registers, too
constexpr u32 kWeightBytes = 64 * kTileM * 2;
constexpr int kKeptTile = 192;  // rows of dS that a tile of dQ reads
// Whether a tile's first block has code of its own: 2 to 3 % at 192/128 (measured); at 256 it gains
// nothing and costs a quarter of the compile time.
constexpr bool kPeelFirst = kHeadDimQk <= 192 && kHeadDimV <= 192;

constexpr u32 kKFull = kSmemBarriers;
constexpr u32 kVFull = kKFull + 8;
constexpr u32 kKEmpty = kVFull + 8;
constexpr u32 kVEmpty = kKEmpty + 8;
constexpr u32 kQFull = kVEmpty + 8;
constexpr u32 kQEmpty = kQFull + 8 * kQStages;
constexpr u32 kDoFull = kQEmpty + 8 * kQStages;
constexpr u32 kDoEmpty = kDoFull + 8 * kDoStages;
constexpr u32 kWeightsFull = kDoEmpty + 8 * kDoStages;
constexpr u32 kWeightsEmpty = kWeightsFull + 8 * 2;
constexpr u32 kJobFull = kWeightsEmpty + 8 * 2;
constexpr u32 kJobEmpty = kJobFull + 8;

// Named barriers: 0 is __syncthreads, then for each consumer that the other reads no more, then one a
// consumer.
constexpr u32 kReadBarrier = 1;
constexpr u32 kWarpgroupBarrier = 3;

// acc[64 x 48] (+)= A B^T, both in shared memory, the reduction along A's rows and along B's.
struct ScoreMma {
  static constexpr int kN = 48;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[24], const u32 (&a)[12], const u32 (&b)[12], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %48, 0;\n"
        "mov.b64 a, {%24, %49};\nmov.b64 b, {%36, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, p, 1, 1, 0, 0;\n"
        "mov.b64 a, {%25, %49};\nmov.b64 b, {%37, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%26, %49};\nmov.b64 b, {%38, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%27, %49};\nmov.b64 b, {%39, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%28, %49};\nmov.b64 b, {%40, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%29, %49};\nmov.b64 b, {%41, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%30, %49};\nmov.b64 b, {%42, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%31, %49};\nmov.b64 b, {%43, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%32, %49};\nmov.b64 b, {%44, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%33, %49};\nmov.b64 b, {%45, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%34, %49};\nmov.b64 b, {%46, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "mov.b64 a, {%35, %49};\nmov.b64 b, {%47, %50};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1, 0, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(b[8]), "r"(b[9]), "r"(b[10]), "r"(b[11]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 48] (+)= A B^T, A in registers, B in shared memory with the reduction along its rows.
struct HeldMma {
  static constexpr int kN = 48;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[24], const u32 (&a)[16], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %44, 0;\n"
        "mov.b64 b, {%40, %45};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, b, p, 1, 1, 0;\n"
        "mov.b64 b, {%41, %45};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%28, %29, %30, %31}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%42, %45};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%32, %33, %34, %35}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%43, %45};\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%36, %37, %38, %39}, b, 1, 1, 1, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 256] (+)= A B, A in registers, B in shared memory with the reduction across its rows.
struct DvMma {
  static constexpr int kN = 256;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[128], const u32 (&a)[12], const u32 (&b)[3], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %143, 0;\n"
        "mov.b64 b, {%140, %144};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, b, p, 1, 1, 1;\n"
        "mov.b64 b, {%141, %144};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%132, %133, %134, %135}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%142, %144};\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%136, %137, %138, %139}, b, 1, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]), "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79]), "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]), "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]), "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]), "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]), "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]), "+f"(acc[111]), "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]), "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]), "+f"(acc[121]), "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]), "+f"(acc[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

using DkMma = DvMma;

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
  TensorMap map_dk;
  TensorMap map_dv;
  void* lse_log2;
  void* d;
  void* tile_counter;
  void* d_s;
  int tiles;
  int q_blocks;
  int heads_q;
  int heads_kv;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  int kv_blocks;
  int kept_rows;
  int heads_before;
  float scale;
  float scale_log2;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 896, "packed by the host");

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
    const TileOrder order = {p.kv_blocks, p.heads_kv, p.total_heads, p.heads_per_group, p.tail_rows};

    TileCoord tile = order.at<false>(index);
    // Of the heads that launches before this one have left.
    const int any_head = p.heads_before + tile.batch * p.heads_kv + tile.head;
    tile.batch = any_head / p.heads_kv;
    tile.head = any_head - tile.batch * p.heads_kv;
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
  }

  ATTNGEN_DEVICE void run() {
    await_dependency();
    for_each_job<true>(smem, slot, [&](const Job& job) {
      for_each_block(p, job, [&](int head, int block) { load(job, head, block); });
    });
  }
};

// ---- the two consumers, of values and of keys, one code where their head dims agree. Both make scores
// from rows that they are the first to read, and sum a gradient of the block before by the other rows:
// the one S^T from Q, P^T, and dV by dO; the other dP^T from dO, with P^T from shared memory dS^T, and
// dK by Q.
template <int kScoreDim, class GradientMma>
struct Consumer {
  static constexpr int kSteps = (kScoreDim + 15) / 16;
  static constexpr int kBoxes = (GradientMma::kN + 63) / 64;
  static constexpr u32 kScoreStageBytes = (kScoreDim + 63) / 64 * kQueryBoxBytes;
  static constexpr u32 kGradientStageBytes = kBoxes * kQueryBoxBytes;
  using Gradient = float[GradientMma::kN / 2];
  using Scores = float[kTileM / 2];
  using Packed = u32[kTileM / 4];

  const Params& p;
  u32 smem;
  bool of_values;
  int warp;
  int lane;
  RingPosition<kStages> score_ring;
  RingPosition<kStages> gradient_ring;
  RingPosition<2> weights_ring;
  u32 held[4 * kHeld];  // the first columns of the tile's rows

  ATTNGEN_DEVICE u32 score_rows() const { return smem + (of_values ? kSmemQ : kSmemDo) + score_ring.stage * kScoreStageBytes; }
  ATTNGEN_DEVICE u32 gradient_rows() const { return smem + (of_values ? kSmemDo : kSmemQ) + gradient_ring.stage * kGradientStageBytes; }
  // The thread's first two of a float a query, LSE or D, that came with the rows for scores.
  ATTNGEN_DEVICE u32 query_row() const { return smem + (of_values ? kSmemLse : kSmemD) + score_ring.stage * kRowBytes + (lane & 3) * 8; }
  ATTNGEN_DEVICE u32 weights() const { return smem + kSmemWeights + weights_ring.stage * kWeightBytes + (warp * 32 + lane) * 16; }

  ATTNGEN_DEVICE void await_score_rows() const { mbarrier_wait(smem + (of_values ? kQFull : kDoFull) + score_ring.stage * 8, score_ring.parity); }
  ATTNGEN_DEVICE void await_gradient_rows() const { mbarrier_wait(smem + (of_values ? kDoFull : kQFull) + gradient_ring.stage * 8, gradient_ring.parity); }
  // Every thread arrives: each has read the LSE, or D, itself.
  ATTNGEN_DEVICE void release_score_rows() {
    mbarrier_arrive(smem + (of_values ? kQEmpty : kDoEmpty) + score_ring.stage * 8);
    score_ring.advance();
  }
  ATTNGEN_DEVICE void release_gradient_rows() {
    mbarrier_arrive(smem + (of_values ? kDoEmpty : kQEmpty) + gradient_ring.stage * 8);
    gradient_ring.advance();
  }

  // ---- of values: weights from scores
  // Makes a block's weights of its scores, and where these bend `slopes`, weights times derivatives.
  ATTNGEN_DEVICE void weigh(Scores& scores, const Context& ctx, const BlockRange& blocks, int key, int block) const {
    if (block < blocks.full_begin || block >= blocks.full_end) {
      hide_queries<kTileM>(scores, mask_list(p), ctx, key, block * kTileM + (lane & 3) * 2);
    }
    weigh_queries<kTileM>(scores, p.scale_log2, query_row());
  }

  ATTNGEN_DEVICE void hand_over(Packed& packed, const Scores& scores) {
    pack_pairs<Element, kTileM / 2>(packed, scores);
    mbarrier_wait(smem + kWeightsEmpty + weights_ring.stage * 8, weights_ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kTileM / 16; ++i) store_shared_x4(weights() + i * 2048, packed + 4 * i);
    mbarrier_arrive(smem + kWeightsFull + weights_ring.stage * 8);
    weights_ring.advance();
  }

  // ---- of keys: gradients of scores
  // Makes dS^T of dP^T, D and the weights.
  ATTNGEN_DEVICE void differentiate(Scores& gradients) {
    float2 means[kTileM / 8];
#pragma unroll
    for (int i = 0; i < kTileM / 8; ++i) means[i] = load_shared_pair(query_row() + i * 32);
    mbarrier_wait(smem + kWeightsFull + weights_ring.stage * 8, weights_ring.parity);
#pragma unroll
    for (int i = 0; i < kTileM / 16; ++i) {
      u32 words[4];
      load_shared_x4(words, weights() + i * 2048);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 weight = Element::unpack(words[k]);
        const float2 mean = means[2 * i + k / 2];
        const int at = 8 * i + 2 * k;
        gradients[at] = weight.x * (gradients[at] - mean.x);
        gradients[at + 1] = weight.y * (gradients[at + 1] - mean.y);
      }
    }
    if (p.kept_rows == 0) mbarrier_arrive(smem + kWeightsEmpty + weights_ring.stage * 8);
    weights_ring.advance();
  }

  // Where a row of dS of the tile's keys is in memory.
  ATTNGEN_DEVICE char* kept_row(const Job& job, int head, int row) const {
    const long long tile = (static_cast<long long>(job.batch) * p.heads_q + head - p.heads_before * p.group_size) * p.kv_blocks + job.tile;
    return static_cast<char*>(p.d_s) + (tile * p.kept_rows + row) * 128;
  }
  // Lays dS down where its weights were, of which all threads have taken theirs, and has it brought to memory.
  ATTNGEN_DEVICE void keep(const Packed& packed, const Job& job, int head, int block) const {
    const u32 tile = smem + kSmemWeights + (weights_ring.stage ^ 1) * kWeightBytes;
    named_barrier_sync(kWarpgroupBarrier + 1, 128);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) stage_transposed(tile, step, packed + 4 * step, warp, lane);
    fence_async_shared();
    named_barrier_sync(kWarpgroupBarrier + 1, 128);
    if (warp == 0 && lane == 0) {
      bulk_store(reinterpret_cast<float*>(kept_row(job, head, block * kTileM)), tile, kWeightBytes);
      tma_store_commit();
    }
  }
  // The place of the last weights is free once their dS has left it.
  ATTNGEN_DEVICE void release_kept() const {
    if (warp == 0 && lane == 0) tma_store_wait_read();
    mbarrier_arrive(smem + kWeightsEmpty + (weights_ring.stage ^ 1) * 8);
  }
  // Zeros where a tile of dQ reads rows whose block does not see the tile's keys.
  ATTNGEN_DEVICE void clear_rows(const Job& job, int begin, int end) const {
#pragma unroll 1
    for (int member = 0; member < p.group_size; ++member) {
      uint4* place = reinterpret_cast<uint4*>(kept_row(job, job.head * p.group_size + member, begin));
#pragma unroll 1
      for (int i = warp * 32 + lane; i < (end - begin) * 8; i += 128) place[i] = make_uint4(0, 0, 0, 0);
    }
  }
  ATTNGEN_DEVICE void clear_unvisited(const Job& job) const {
    const int begin = job.block_begin * kTileM;
    const int end = job.block_end * kTileM;
    clear_rows(job, begin / kKeptTile * kKeptTile, begin);
    clear_rows(job, end, min_of(ceil_div(end, kKeptTile) * kKeptTile, p.kept_rows));
  }

  // A block's scores, weighed or differentiated, and the gradient's part of the block before; goes on to
  // the next.
  ATTNGEN_DEVICE void visit(bool first, Gradient& sums, Scores& scores, Packed& packed, const Context& ctx, const BlockRange& blocks, const Job& job, int key, int& block, int& head) {
    await_score_rows();
    gemm_partly_held<HeldMma, ScoreMma, kHeld, kSteps, kKeyBoxBytes, kQueryBoxBytes>(scores, held, smem + (of_values ? kSmemK : kSmemV), score_rows());
    if (!first) {
      await_gradient_rows();
      gemm_accumulate<GradientMma, kTileM / 16, kQueryBoxBytes>(sums, packed, gradient_rows());
    } else {
      wgmma_commit();  // a group of none, so that the scores' is always the last but one
    }
    if (!of_values && !first && p.kept_rows != 0) release_kept();
    wgmma_wait<1>();
    settle(scores);
    if (of_values) {
      weigh(scores, ctx, blocks, key, block);
    } else {
      differentiate(scores);
    }
    release_score_rows();
    wgmma_wait<0>();
    if (!first) release_gradient_rows();
    if (of_values) {
      hand_over(packed, scores);
    } else {
      pack_pairs<Element, kTileM / 2>(packed, scores);
      if (p.kept_rows != 0) keep(packed, job, head, block);
    }
    if (++block == job.block_end) {
      block = job.block_begin;
      ++head;
    }
  }

  // The gradient leaves once no warpgroup reads what the scores' products had of the tile.
  ATTNGEN_DEVICE void store(const Gradient& sums, const Job& job) const {
    const u32 empty = smem + (of_values ? kVEmpty : kKEmpty);
    const float factor = (of_values ? 1.f : p.scale);
    // Not one barrier for both, which they would reach at different instructions: synccheck stops there.
    named_barrier_arrive(kReadBarrier + !of_values, 256);
    named_barrier_sync(kReadBarrier + of_values, 256);
    const u32 tile = smem + (of_values ? kSmemV : kSmemK);  // its place
    stage_rows<Element, GradientMma::kN, kKeyBoxBytes>(tile, sums, factor, warp, lane);
    fence_async_shared();
    named_barrier_sync(kWarpgroupBarrier + !of_values, 128);
    if (warp == 0 && lane == 0) {
      const auto* map = of_values ? &p.map_dv : &p.map_dk;
      const int row = kv_sequence(p).first_row(job.batch) + job.tile * kTileN;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        tma_store(map, tile + box * kKeyBoxBytes, box * 64, row, job.head, kv_sequence(p).batch_index(job.batch));
      }
      tma_store_commit();
      tma_store_wait_read();
      mbarrier_arrive(empty);
    }
  }

  ATTNGEN_DEVICE void run_tile(const Job& job, u32 parity) {
    const Context ctx = tile_context(p, job.batch, job.head * p.group_size);
    const int first = job.tile * kTileN;
    const int key = first + warp * 16 + lane / 4;
    BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, min_of(first + 64, ctx.kv_len) - 1);
    if (first + 64 > ctx.kv_len) blocks.full_end = job.block_begin;
    Gradient sums;
    Scores scores;
    Packed packed;
#pragma unroll
    for (int i = 0; i < GradientMma::kN / 2; ++i) sums[i] = 0.f;
    mbarrier_wait(smem + (of_values ? kKFull : kVFull), parity);
    load_operand<kHeld, kKeyBoxBytes>(held, smem + (of_values ? kSmemK : kSmemV), warp, lane);
    const int steps = (job.block_end - job.block_begin) * p.group_size;
    if (steps > 0) {
      int head = job.head * p.group_size;
      int block = job.block_begin;
      if (!of_values && p.kept_rows != 0) clear_unvisited(job);
      if (kPeelFirst) visit(true, sums, scores, packed, ctx, blocks, job, key, block, head);
#pragma unroll 1
      for (int step = kPeelFirst; step < steps; ++step) visit(!kPeelFirst && step == 0, sums, scores, packed, ctx, blocks, job, key, block, head);
      await_gradient_rows();
      gemm_accumulate<GradientMma, kTileM / 16, kQueryBoxBytes>(sums, packed, gradient_rows());
      wgmma_wait<0>();
      release_gradient_rows();
      if (!of_values && p.kept_rows != 0) release_kept();
    }
    store(sums, job);
  }

  ATTNGEN_DEVICE void run(const volatile Job* slot) {
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
sm90_bwd_dkv__full_d256_bf16__d4c682(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  Job* slot = reinterpret_cast<Job*>(shared + kSmemJob);
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(smem + kKFull, 1);
    mbarrier_init(smem + kVFull, 1);
    mbarrier_init(smem + kKEmpty, 1);
    mbarrier_init(smem + kVEmpty, 1);
    for (int i = 0; i < kQStages; ++i) {
      mbarrier_init(smem + kQFull + i * 8, 1);
      mbarrier_init(smem + kQEmpty + i * 8, 256);
    }
    for (int i = 0; i < kDoStages; ++i) {
      mbarrier_init(smem + kDoFull + i * 8, 1);
      mbarrier_init(smem + kDoEmpty + i * 8, 256);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem + kWeightsFull + i * 8, 128);
      mbarrier_init(smem + kWeightsEmpty + i * 8, 128);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, 256 + 1);  // consumer threads, loader
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warp = threadIdx.x % 128 / 32;
  const int lane = threadIdx.x % 32;
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot}.run(KvLoader{p, smem});
    if (threadIdx.x == 32) QueryLoader{p, smem, slot}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<kHeadDimQk, DvMma>{p, smem, role == 1, warp, lane}.run(slot);
  }
}
