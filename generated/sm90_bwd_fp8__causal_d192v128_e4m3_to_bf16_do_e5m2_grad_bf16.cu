// sm90_bwd_fp8__causal_d192v128_e4m3_to_bf16_do_e5m2_grad_bf16__ec8199
// Rendered by attngen from kernels/wgmma/backward/fp8.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/stage.cuh"
#include "attngen/mma/stage8.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale_gradients.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/transposed.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 192;
constexpr int kHeadDimV = 128;
using Weight = E4m3;            // what P is stored as
using ScoreGradient = E5m2;  // what dS is stored as
using Gradient = Bf16;

// ---- the plan
constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
constexpr int kStages = 2;  // of all that blocks have
constexpr int kQkSteps = ceil_div(kHeadDimQk, 32);
constexpr int kHeldSteps = 4;  // of keys, which consumers have in registers
constexpr int kVSteps = ceil_div(kHeadDimV, 32);
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kRowBytes = kTileM * 4;  // one float a query
// Queries and output gradients of a block, transposed: rows have both, the latter behind the others. Keys of a tile.
constexpr u32 kTurnedBytes = 12288;
constexpr u32 kTurnedDo = kTileM;
constexpr u32 kTurnedKeyBytes = 12288;
// Columns of dQ that a warpgroup holds in 64 rows.
constexpr int kDqColumns = 48;
constexpr u32 kDqBytes = 64 * kDqColumns * 4;
constexpr int kQkBoxes = ceil_div(kHeadDimQk, 128);
constexpr int kVBoxes = ceil_div(kHeadDimV, 128);
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemDo = 32768;
constexpr u32 kSmemTurned = 49152;
constexpr u32 kSmemK = 73728;
constexpr u32 kSmemV = 106496;
constexpr u32 kSmemKt = 122880;
constexpr u32 kSmemDs = 135168;
constexpr u32 kSmemDq = 151552;
constexpr u32 kSmemFactors = 176128;
constexpr u32 kSmemLse = 176144;
constexpr u32 kSmemD = 176656;
constexpr u32 kSmemBarriers = 177168;
constexpr u32 kSmemJob = 177376;
constexpr u32 kJobBytes = 24;

constexpr u32 kKFull = kSmemBarriers;
constexpr u32 kKEmpty = kKFull + 8;
constexpr u32 kVFull = kKEmpty + 8;
constexpr u32 kVEmpty = kVFull + 8;
constexpr u32 kKtFull = kVEmpty + 8;
constexpr u32 kKtEmpty = kKtFull + 8;
constexpr u32 kQFull = kKtEmpty + 8;  // with output gradients, LSE and D
constexpr u32 kQEmpty = kQFull + 8 * kStages;
constexpr u32 kTurnedFull = kQEmpty + 8 * kStages;
constexpr u32 kTurnedEmpty = kTurnedFull + 8 * kStages;
constexpr u32 kDqFull = kTurnedEmpty + 8 * kStages;
constexpr u32 kDqEmpty = kDqFull + 8 * 2 * kConsumers;
constexpr u32 kDsFull = kDqEmpty + 8 * kConsumers;
constexpr u32 kDsEmpty = kDsFull + 8 * kStages;
constexpr u32 kJobFull = kDsEmpty + 8 * kStages;
constexpr u32 kJobEmpty = kJobFull + 8;

// Named barriers: 0 is __syncthreads, then all consumers, then one a consumer.
constexpr u32 kConsumersBarrier = 1;
constexpr u32 kWarpgroupBarrier = 2;
constexpr u32 kTurnBarrier = 2 + kConsumers;

// acc[64 x 64] (+)= A B^T, A (e4m3) in registers, B (e4m3) in shared memory with the reduction along its rows.
struct HeldMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[16], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %52, 0;\n"
        "mov.b64 b, {%48, %53};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1;\n"
        "mov.b64 b, {%49, %53};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%36, %37, %38, %39}, b, 1, 1, 1;\n"
        "mov.b64 b, {%50, %53};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%40, %41, %42, %43}, b, 1, 1, 1;\n"
        "mov.b64 b, {%51, %53};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%44, %45, %46, %47}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 64] (+)= A B^T, A (e4m3) and B (e4m3) in shared memory with the reduction along their rows.
struct ScoreMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[2], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %36, 0;\n"
        "mov.b64 a, {%32, %37};\nmov.b64 b, {%34, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%33, %37};\nmov.b64 b, {%35, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 64] (+)= A B^T, A (e4m3) and B (e5m2) in shared memory with the reduction along their rows.
struct GradientMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %40, 0;\n"
        "mov.b64 a, {%32, %41};\nmov.b64 b, {%36, %42};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%33, %41};\nmov.b64 b, {%37, %42};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%34, %41};\nmov.b64 b, {%38, %42};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%35, %41};\nmov.b64 b, {%39, %42};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 64] (+)= A B^T, A (e4m3) in registers, B (e5m2) in shared memory with the reduction along its rows.
struct DvMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[8], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %42, 0;\n"
        "mov.b64 b, {%40, %43};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1;\n"
        "mov.b64 b, {%41, %43};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%36, %37, %38, %39}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 96] (+)= A B^T, A (e5m2) in registers, B (e4m3) in shared memory with the reduction along its rows.
struct DkMma {
  static constexpr int kN = 96;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[48], const u32 (&a)[8], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %58, 0;\n"
        "mov.b64 b, {%56, %59};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, b, p, 1, 1;\n"
        "mov.b64 b, {%57, %59};\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%52, %53, %54, %55}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 48] (+)= A B^T, A (e5m2) and B (e4m3) in shared memory with the reduction along their rows.
struct DqMma {
  static constexpr int kN = 48;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[24], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %32, 0;\n"
        "mov.b64 a, {%24, %33};\nmov.b64 b, {%28, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%25, %33};\nmov.b64 b, {%29, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%26, %33};\nmov.b64 b, {%30, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%27, %33};\nmov.b64 b, {%31, %34};\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
  }
};

// ---- the fragments
struct CausalMask {
  // Keys that query i sees.
  ATTNGEN_HD Range row_range(const Context& ctx, int i) const { return {0, i + ctx.delta + 1}; }
  // Queries that see key j.
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const { return {j - ctx.delta, ctx.q_len}; }
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

using QSequence = DenseSequence;
using KvSequence = DenseSequence;
using KvFetch = TmaFetch;

struct Params {
  TensorMap map_q;
  TensorMap map_k;
  TensorMap map_v;
  TensorMap map_d_o;
  void* lse_log2;
  void* d;
  void* dq_acc;
  void* tile_counter;
  void* turns;
  void* queries_turned;
  void* keys_turned;
  void* descale_q;
  void* descale_k;
  void* descale_v;
  void* descale_do;
  void* scale_s;
  void* descale_s;
  void* scale_dp;
  void* descale_dp;
  void* amax_dp;
  void* amax_dk;
  void* amax_dv;
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
  float scale;
  float scale_log2;
  void* dk;
  long long dk_stride_row;
  long long dk_stride_head;
  long long dk_stride_batch;
  void* dv;
  long long dv_stride_row;
  long long dv_stride_head;
  long long dv_stride_batch;
  int q_len;
  int kv_len;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 832, "packed by the host");

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
  int half;  // which half of the gradients' columns
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

    const TileCoord tile = order.at<false>(index / 2);
    const Context ctx = tile_context(p, tile.batch, tile.head * p.group_size);
    const int first = tile.row_block * kTileN;
    const int last = min_of(first + kTileN, ctx.kv_len) - 1;
    const BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, last);
    slot->tile = tile.row_block;
    slot->head = tile.head;
    slot->batch = tile.batch;
    slot->block_begin = blocks.begin;
    slot->block_end = blocks.end;
    slot->half = index % 2;
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
    const Job job = {slot->tile, slot->head, slot->batch, slot->block_begin, slot->block_end, slot->half};
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

// The place of a tile of keys among those of all sequences and heads.
ATTNGEN_DEVICE long long key_tile_place(const Params& p, int batch, int head, int tile) {
  return (static_cast<long long>(batch) * p.heads_kv + head) * p.kv_blocks + tile;
}
// ---- loaders: the tile's keys and values, by the scheduler's thread
struct KvLoader {
  const Params& p;
  u32 smem;
  u32 parity = 1;

  template <int kBoxes>
  ATTNGEN_DEVICE void load(u32 place, const TensorMap* map, u32 full, const Job& job) const {
    const int row = kv_sequence(p).first_row(job.batch) + job.tile * kTileN;
    const auto batch = kv_sequence(p).batch_index(job.batch);
    mbarrier_wait(full + 8, parity);
    mbarrier_arrive_expect(full, kBoxes * kKeyBoxBytes);
    KvFetch::load<kBoxes, 128>(place, kKeyBoxBytes, map, full, row, job.head, batch, kEvictFirst);
  }
  ATTNGEN_DEVICE void operator()(const Job& job) {
    load<kQkBoxes>(smem + kSmemK, &p.map_k, smem + kKFull, job);
    load<kVBoxes>(smem + kSmemV, &p.map_v, smem + kVFull, job);
    mbarrier_wait(smem + kKtEmpty, parity);
    await_dependency();  // the kernel before lays them down
    mbarrier_arrive_expect(smem + kKtFull, kTurnedKeyBytes);
    const char* keys = static_cast<const char*>(p.keys_turned) + (2 * key_tile_place(p, job.batch, job.head, job.tile) + job.half) * kTurnedKeyBytes;
    bulk_load(smem + kSmemKt, keys, kTurnedKeyBytes, smem + kKtFull);
    parity ^= 1;
  }
};

// Loads the blocks of queries, by a thread of its own.
struct QueryLoader {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  RingPosition<kStages> ring;

  ATTNGEN_DEVICE void load(const Job& job, int head, int block) {
    const int row = q_sequence(p).first_row(job.batch) + block * kTileM;
    const auto batch = q_sequence(p).batch_index(job.batch);
    const long long at = workspace_block(p, job.batch, head, block);
    const u32 full = smem + kQFull + ring.stage * 8;
    mbarrier_wait(smem + kQEmpty + ring.stage * 8, ring.parity ^ 1);
    mbarrier_arrive_expect(full, (kQkBoxes + kVBoxes) * kQueryBoxBytes + 2 * kRowBytes);
    TmaFetch::load<kQkBoxes, 128>(smem + kSmemQ + ring.stage * kQkBoxes * kQueryBoxBytes, kQueryBoxBytes, &p.map_q, full, row, head, batch, kEvictLast);
    TmaFetch::load<kVBoxes, 128>(smem + kSmemDo + ring.stage * kVBoxes * kQueryBoxBytes, kQueryBoxBytes, &p.map_d_o, full, row, head, batch, kEvictLast);
    load_row(smem + kSmemLse + ring.stage * kRowBytes, p.lse_log2, at * kTileM, full);
    load_row(smem + kSmemD + ring.stage * kRowBytes, p.d, at * kTileM, full);
    const u32 turned_full = smem + kTurnedFull + ring.stage * 8;
    mbarrier_wait(smem + kTurnedEmpty + ring.stage * 8, ring.parity ^ 1);
    mbarrier_arrive_expect(turned_full, kTurnedBytes);
    const char* turned = static_cast<const char*>(p.queries_turned) + (2 * at + job.half) * kTurnedBytes;
    bulk_load(smem + kSmemTurned + ring.stage * kTurnedBytes, turned, kTurnedBytes, turned_full);
    ring.advance();
  }

  ATTNGEN_DEVICE void run() {
    await_dependency();
    for_each_job<true>(smem, slot, [&](const Job& job) {
      for_each_block(p, job, [&](int head, int block) { load(job, head, block); });
    });
  }
};
// ---- reducers: two threads, every other block each, so that one's additions may still be on their way when the other
// starts. The tile that comes first to a block of queries stores its part there, and others add theirs.
struct Reducer {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  u32 turn;

  ATTNGEN_DEVICE void add(const Job& job, int head, int block, u32 parity) const {
    const long long at = 2 * workspace_block(p, job.batch, head, block) + job.half;
    float* target = static_cast<float*>(p.dq_acc) + at * (kConsumers * kDqBytes / 4);
    int* turns = static_cast<int*>(p.turns) + at;
    const u32 full = smem + kDqFull + turn * kConsumers * 8;
    // A tile claims the first turn, 1, with its part at hand, and waits for nobody then. Mostly the sums are there, 2,
    // which is known before this tile's part is.
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
// What makes log2 units of products of queries and keys.
ATTNGEN_DEVICE float scale_log2_of(u32 smem) { return load_shared_float(smem + kSmemFactors); }
// By what dP (x) and D (y) are multiplied, so that their difference times stored weights is what dS is stored as.
ATTNGEN_DEVICE float2 gradient_factors_of(u32 smem) { return load_shared_pair(smem + kSmemFactors + 8); }

ATTNGEN_DEVICE void store_factors(const Params& p, u32 smem) {
  const float stored = stored_scale(read_scale(p.scale_dp, 0)) / scale_of_weights(p.scale_s, 0x1p8f);
  const float of_mean = limited(p.scale * stored);
  store_shared(smem + kSmemFactors, log2_scale(p.scale_log2 * (read_scale(p.descale_q, 0) * read_scale(p.descale_k, 0))));
  store_shared(smem + kSmemFactors + 8, limited(of_mean * (read_scale(p.descale_do, 0) * read_scale(p.descale_v, 0))));
  store_shared(smem + kSmemFactors + 12, of_mean);
}
// ---- consumer: 64 keys
struct Consumer {
  const Params& p;
  u32 smem;
  int warpgroup;
  int warp;
  int lane;
  float largest = 0.f;  // of what dS is stored as, whatever its sign
  RingPosition<kStages> ring;  // of the block at hand, in all that blocks have: a step advances all of it

  using Scores = float[kTileM / 2];
  using Packed = u32[kTileM / 8];
  using Dq = float[kDqColumns / 2];
  using HeldKeys = u32[4 * max_of(kHeldSteps, 1)];
  struct Gradients {
    float dk[DkMma::kN / 2];
    float dv[DvMma::kN / 2];
  };

  ATTNGEN_DEVICE u32 queries() const { return smem + kSmemQ + ring.stage * kQkBoxes * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 output_gradients() const { return smem + kSmemDo + ring.stage * kVBoxes * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 turned() const { return smem + kSmemTurned + ring.stage * kTurnedBytes; }
  static_assert(kStages == 2, "the block before is in the other stage");
  ATTNGEN_DEVICE u32 last_stage() const { return ring.stage ^ 1; }
  ATTNGEN_DEVICE u32 last_parity() const { return ring.parity ^ ring.stage ^ 1; }

  ATTNGEN_DEVICE u32 keys() const { return smem + kSmemK + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 values() const { return smem + kSmemV + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 score_gradients(u32 stage) const { return smem + kSmemDs + stage * kQueryBoxBytes; }
  // Where the thread's first two of a block's LSE or D lie.
  ATTNGEN_DEVICE u32 query_row(u32 region) const { return smem + region + ring.stage * kRowBytes + (lane & 3) * 8; }

  ATTNGEN_DEVICE void hide(Scores& scores, const Context& ctx, int key, int block) const {
    hide_queries<kTileM>(scores, mask_list(p), ctx, key, block * kTileM + (lane & 3) * 2);
  }

  // S^T becomes P^T.
  ATTNGEN_DEVICE void weigh(Scores& scores, Packed& packed) const {
    weigh_queries<kTileM>(scores, scale_log2_of(smem), query_row(kSmemLse));
    pack_rows<Weight, kTileM>(packed, scores);
  }

  // 32 queries of dP^T, from index `i`, become dS^T.
  ATTNGEN_DEVICE void differentiate(Scores& gradients, const Scores& scores, int i) {
    const u32 d = query_row(kSmemD);
    const float2 factors = gradient_factors_of(smem);
#pragma unroll
    for (int k = i; k < i + 16; k += 4) {
      float2 mean = load_shared_pair(d + k * 8);
      mean.x *= factors.y;
      mean.y *= factors.y;
#pragma unroll
      for (int n = k; n < k + 4; ++n) {
        gradients[n] = scores[n] * (gradients[n] * factors.x - (n % 2 ? mean.y : mean.x));
        largest = fmaxf(largest, fabsf(gradients[n]));
      }
    }
  }
  // This warpgroup's part of dQ: all queries, some columns.
  ATTNGEN_DEVICE u32 dq_rows() const { return score_gradients(last_stage()); }
  ATTNGEN_DEVICE u32 dq_keys() const { return smem + kSmemKt + warpgroup * (kDqColumns * 128); }

  ATTNGEN_DEVICE void hand_over_dq(const Dq& dq) {
    const u32 dq_turn = last_stage();  // which reducer's
    mbarrier_wait(smem + kDqEmpty + warpgroup * 8, dq_turn ^ 1);
    const u32 part = smem + kSmemDq + warpgroup * kDqBytes + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < kDqColumns / 2; i += 4) store_shared_x4(part + i * 512, dq + i);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kDqFull + (dq_turn * kConsumers + warpgroup) * 8);
  }

  // The products of one warpgroup run under the other's arithmetic: each takes its turn.
  ATTNGEN_DEVICE void await_turn() const { named_barrier_sync(kTurnBarrier + warpgroup, 256); }
  ATTNGEN_DEVICE void pass_turn() const { named_barrier_arrive(kTurnBarrier + (warpgroup + 1) % kConsumers, 256); }

  // Issues the products of dQ of the block before this one, once every warpgroup's dS is there.
  ATTNGEN_DEVICE void issue_dq(Dq& dq) {
    mbarrier_wait(smem + kDsFull + last_stage() * 8, last_parity());
    gemm_shared_shared<DqMma, kTileN / 32, kQueryBoxBytes, kTurnedKeyBytes>(dq, dq_rows(), dq_keys());
  }
  // Frees dS of the block before, which has been read now that dQ is there, and hands dQ over.
  ATTNGEN_DEVICE void finish_dq(Dq& dq) {
    settle(dq);
    if (lane == 0) mbarrier_arrive(smem + kDsEmpty + last_stage() * 8);
    hand_over_dq(dq);
  }
  // Works on one block of queries. Its dQ waits for the next block: by then the other warpgroup has laid down its dS,
  // and nobody waits for anybody.
  ATTNGEN_DEVICE void step(Gradients& sums, const HeldKeys& held, const Context& ctx, int key, int block, bool masked, bool first) {
    Scores scores;
    Scores gradients;
    Packed packed_weights;
    Packed packed_gradients;
    mbarrier_wait(smem + kQFull + ring.stage * 8, ring.parity);
    gemm_partly_held<HeldMma, ScoreMma, kHeldSteps, kQkSteps, kKeyBoxBytes, kQueryBoxBytes>(scores, held, keys(), queries());
    gemm_shared_shared<GradientMma, kVSteps, kKeyBoxBytes, kQueryBoxBytes>(gradients, values(), output_gradients());
    wgmma_wait<1>();
    settle(scores);
    if (masked) hide(scores, ctx, key, block);
    weigh(scores, packed_weights);
    wgmma_wait<0>();
    settle(gradients);
    mbarrier_wait(smem + kDsEmpty + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kTileM / 32; ++i) {  // 32 queries at a time keep the registers few
      differentiate(gradients, scores, i * 16);
      pack_rows<ScoreGradient>(packed_gradients + i * 4, gradients + i * 16);
      pack_rows<ScoreGradient>(packed_gradients + i * 4 + 2, gradients + i * 16 + 8);
      stage_transposed_bytes(score_gradients(ring.stage), i, warpgroup * 4 + warp, packed_gradients + i * 4, lane);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kDsFull + ring.stage * 8);
    mbarrier_arrive(smem + kQEmpty + ring.stage * 8);  // read by products, and LSE and D by every lane
    mbarrier_wait(smem + kTurnedFull + ring.stage * 8, ring.parity);
    await_turn();
    gemm_register_shared<DvMma, kTileM / 32, kTurnedBytes>(sums.dv, packed_weights, turned() + kTurnedDo, true);
    if (first) {
      pass_turn();
      gemm_register_shared<DkMma, kTileM / 32, kTurnedBytes>(sums.dk, packed_gradients, turned(), true);
    } else {
      Dq dq;
      issue_dq(dq);
      pass_turn();
      gemm_register_shared<DkMma, kTileM / 32, kTurnedBytes>(sums.dk, packed_gradients, turned(), true);
      wgmma_wait<1>();
      finish_dq(dq);
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(smem + kTurnedEmpty + ring.stage * 8);
    ring.advance();
  }
  // Stores a gradient whose sums times `factor` it is, and notes the largest. first: the tensor's first column in the row
  // of the tile's first key. place: twice the tile, and the half. scale: by which it is multiplied to be stored.
  template <int kN, int kColumns>
  ATTNGEN_DEVICE void store(char* first, long long stride, const float (&sums)[kN / 2], const Job& job, int place, float factor, void* amax) const {
    if (amax) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) most = fmaxf(most, fabsf(sums[i]));
      atomic_max(static_cast<float*>(amax), warp_max(most) * factor, lane);
    }
    const float stored = factor;
    const int rows = kv_sequence(p).length(job.batch) - (place >> 1) * kTileN;
    const int column = (place & 1) * kN + (lane & 3) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warpgroup * 64 + warp * 16 + lane / 4 + half * 8;
      if (row >= rows) continue;
      char* target = first + 2 * (row * stride + column);
#pragma unroll
      for (int i = 2 * half; i < kN / 2; i += 4) {
        if (2 * kN > kColumns && column + fragment_column(i) >= kColumns) continue;
        *reinterpret_cast<u32*>(target + 2 * fragment_column(i)) = static_cast<u32>(Gradient::pack(sums[i] * stored, sums[i + 1] * stored));
      }
    }
  }
  ATTNGEN_DEVICE char* dk_rows(const Job& job, int place) const {
    const long long row = (place >> 1) * kTileN;
    return static_cast<char*>(p.dk) + 2 * (job.batch * p.dk_stride_batch + job.head * p.dk_stride_head + row * p.dk_stride_row);
  }
  ATTNGEN_DEVICE char* dv_rows(const Job& job, int place) const {
    const long long row = (place >> 1) * kTileN;
    return static_cast<char*>(p.dv) + 2 * (job.batch * p.dv_stride_batch + job.head * p.dv_stride_head + row * p.dv_stride_row);
  }
  ATTNGEN_DEVICE void store_dv(const Gradients& sums, const Job& job, int place) const {
    const float factor = limited(descale_of_weights(p.descale_s, 0x1p8f) * read_scale(p.descale_do, 0));
    store<DvMma::kN, kHeadDimV>(dv_rows(job, place), p.dv_stride_row, sums.dv, job, place, factor, p.amax_dv);
  }
  ATTNGEN_DEVICE void store_dk(const Gradients& sums, const Job& job, int place) const {
    const float factor = limited(read_scale(p.descale_dp, 0) * read_scale(p.descale_q, 0));
    store<DkMma::kN, kHeadDimQk>(dk_rows(job, place), p.dk_stride_row, sums.dk, job, place, factor, p.amax_dk);
  }
  ATTNGEN_DEVICE void run_tile(const Job& job, u32 parity) {
    const Context ctx = tile_context(p, job.batch, job.head * p.group_size);
    const int first = job.tile * kTileN + warpgroup * 64;
    const int last = min_of(first + 64, ctx.kv_len) - 1;
    BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, last);
    if (first + 64 > ctx.kv_len) blocks.full_end = job.block_begin;
    const int place = 2 * job.tile + job.half;  // in one register across the blocks
    Gradients sums;
#pragma unroll
    for (int i = 0; i < DkMma::kN / 2; ++i) sums.dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < DvMma::kN / 2; ++i) sums.dv[i] = 0.f;
    mbarrier_wait(smem + kKFull, parity);
    HeldKeys held;
    load_operand<kHeldSteps, kKeyBoxBytes>(held, keys(), warp, lane);
    __syncwarp();  // a thread frees the keys for its warp
    mbarrier_wait(smem + kVFull, parity);
    bool first_step = true;
    for_each_block(p, job, [&](int, int block) {
      const int key = (forget(place) >> 1) * kTileN + warpgroup * 64 + warp * 16 + lane / 4;
      step(sums, held, ctx, key, block, block < blocks.full_begin || block >= blocks.full_end, first_step);
      if (first_step) mbarrier_wait(smem + kKtFull, parity);  // for dQ, with the next block
      first_step = false;
    });
    if (first_step) mbarrier_wait(smem + kKtFull, parity);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kVEmpty);
    if (lane == 0) mbarrier_arrive(smem + kKEmpty);
    if (first_step) {
      store_dv(sums, job, place);
    } else {
      Dq dq;
      issue_dq(dq);
      store_dv(sums, job, place);
      wgmma_wait<0>();
      finish_dq(dq);
    }
    if (lane == 0) mbarrier_arrive(smem + kKtEmpty);
    store_dk(sums, job, place);
  }

  ATTNGEN_DEVICE void run(const volatile Job* slot) {
    if (warpgroup == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 256);
    u32 parity = 0;
    for_each_job(smem, slot, [&](const Job& job) {
      run_tile(job, parity);
      parity ^= 1;
    });
    if (p.amax_dp) atomic_max(static_cast<float*>(p.amax_dp), warp_max(largest) / stored_scale(read_scale(p.scale_dp, 0)), lane);
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(384, 1)
sm90_bwd_fp8__causal_d192v128_e4m3_to_bf16_do_e5m2_grad_bf16__ec8199(const __grid_constant__ attngen::Params p) {
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
    for (u32 full = kKFull; full < kQFull; full += 16) {
      mbarrier_init(smem + full, 1);
      mbarrier_init(smem + full + 8, kConsumers * 4);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kQFull + i * 8, 1);
      mbarrier_init(smem + kQEmpty + i * 8, kConsumers * 128);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kTurnedFull + i * 8, 1);
      mbarrier_init(smem + kTurnedEmpty + i * 8, kConsumers * 4);
    }
    for (int i = 0; i < kConsumers; ++i) {
      mbarrier_init(smem + kDqFull + i * 8, 4);
      mbarrier_init(smem + kDqFull + (kConsumers + i) * 8, 4);
      mbarrier_init(smem + kDqEmpty + i * 8, 1);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kDsFull + i * 8, kConsumers * 4);
      mbarrier_init(smem + kDsEmpty + i * 8, kConsumers * 4);
    }
    store_factors(p, smem);
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
