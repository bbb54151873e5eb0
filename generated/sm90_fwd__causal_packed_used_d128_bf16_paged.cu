// sm90_fwd__causal_packed_used_d128_bf16_paged__31b946
// Rendered by attngen from kernels/wgmma/forward/forward.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/copy/paged_blocks.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/gap_rows.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/sequence_order.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/online.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
// Elements of the weights; of queries and keys, where these differ; of an output in boxes.
using Element = Bf16;
using Output = Bf16;

// ---- the plan
constexpr int kTileM = 128;
constexpr int kTileN = 128;
constexpr int kKStages = 3;
constexpr int kVStages = 2;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kLazyRescaleLog2 = 8;
constexpr int kAhead = kTileN / 8 * 2;
constexpr bool kPairSums = true;
constexpr bool kLongestFirst = true;
constexpr bool kOutputOverQ = false;

// A row of a box is 128 bytes, a step of a product's reduction 32.
constexpr int kBoxColumns = 64;
constexpr int kQkSteps = ceil_div(kHeadDimQk, kBoxColumns / 4);
constexpr int kPvSteps = kTileN / (kBoxColumns / 4);
constexpr int kQkBoxes = ceil_div(kHeadDimQk, kBoxColumns);
constexpr int kVBoxes = ceil_div(kHeadDimV, kBoxColumns);
constexpr int kOBoxColumns = 64;
constexpr int kOBoxes = ceil_div(kHeadDimV, kOBoxColumns);
constexpr int kWeightRegisters = kTileN / 4;
constexpr u32 kRowBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kVStageBytes = kVBoxes * kKeyBoxBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 32768;
constexpr u32 kSmemV = 131072;
constexpr u32 kSmemO = 196608;
constexpr u32 kSmemBarriers = 229376;
constexpr u32 kSmemJob = 230400;
constexpr u32 kJobBytes = 48;
constexpr u32 kSmemOrder = 230448;
constexpr u32 kQFull = kSmemBarriers;
constexpr u32 kQEmpty = kQFull + 8 * kConsumers;
constexpr u32 kKFull = kQEmpty + 8 * kConsumers;
constexpr u32 kKEmpty = kKFull + 8 * kKStages;
constexpr u32 kVFull = kKEmpty + 8 * kKStages;
constexpr u32 kVEmpty = kVFull + 8 * kVStages;
constexpr u32 kJobFull = kVEmpty + 8 * kVStages;
constexpr u32 kJobEmpty = kJobFull + 8;
constexpr u32 kVTail = kJobEmpty + 8;
// Named barriers: 0 is __syncthreads, then one a consumer for its turn, one for its epilogue.
constexpr u32 kTurnBarrier = 1;
constexpr u32 kEpilogueBarrier = kTurnBarrier + kConsumers;

// acc[64 x 128] (+)= A B^T, A in registers, B in shared memory with the reduction along its rows.
struct QkMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[32], const u32 (&b)[8], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %104, 0;\n"
        "mov.b64 b, {%96, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, b, p, 1, 1, 0;\n"
        "mov.b64 b, {%97, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%68, %69, %70, %71}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%98, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%72, %73, %74, %75}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%99, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%76, %77, %78, %79}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%100, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%80, %81, %82, %83}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%101, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%84, %85, %86, %87}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%102, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%88, %89, %90, %91}, b, 1, 1, 1, 0;\n"
        "mov.b64 b, {%103, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%92, %93, %94, %95}, b, 1, 1, 1, 0;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(a[16]), "r"(a[17]), "r"(a[18]), "r"(a[19]), "r"(a[20]), "r"(a[21]), "r"(a[22]), "r"(a[23]), "r"(a[24]), "r"(a[25]), "r"(a[26]), "r"(a[27]), "r"(a[28]), "r"(a[29]), "r"(a[30]), "r"(a[31]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 128] (+)= A B, A in registers, B in shared memory with the reduction across its rows.
struct PvMma {
  static constexpr int kN = 128;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[64], const u32 (&a)[32], const u32 (&b)[8], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %104, 0;\n"
        "mov.b64 b, {%96, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, b, p, 1, 1, 1;\n"
        "mov.b64 b, {%97, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%68, %69, %70, %71}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%98, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%72, %73, %74, %75}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%99, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%76, %77, %78, %79}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%100, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%80, %81, %82, %83}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%101, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%84, %85, %86, %87}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%102, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%88, %89, %90, %91}, b, 1, 1, 1, 1;\n"
        "mov.b64 b, {%103, %105};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%92, %93, %94, %95}, b, 1, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]), "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "r"(a[16]), "r"(a[17]), "r"(a[18]), "r"(a[19]), "r"(a[20]), "r"(a[21]), "r"(a[22]), "r"(a[23]), "r"(a[24]), "r"(a[25]), "r"(a[26]), "r"(a[27]), "r"(a[28]), "r"(a[29]), "r"(a[30]), "r"(a[31]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
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
struct PackedSequence {
  int len;
  const void* seqlens;
  const void* offsets;
  int longest;

  // Where the tensors say that the sequence lies, which may be anywhere.
  ATTNGEN_HD Span claim(int batch) const {
    const int* ends = static_cast<const int*>(seqlens) + batch;
    return {static_cast<const int*>(offsets)[batch], difference(ends[1], ends[0])};
  }
  // Whether that is inside the tensor; a sequence that is not has no tokens.
  ATTNGEN_HD bool lies(int batch) const { return lies_within(claim(batch), len, longest); }
  ATTNGEN_HD Span span(int batch) const { return span_within(claim(batch), len, longest); }
  ATTNGEN_HD int length(int batch) const { return span(batch).length; }
  // Where a tensor map that ends where the sequence does has position 0.
  ATTNGEN_HD int first_row(int batch) const { return kLongest - length(batch); }
  ATTNGEN_HD SequenceIndex batch_index(int batch) const {
    const Span found = span(batch);
    return {found.length, found.start};
  }
  // Of one that was found before.
  ATTNGEN_HD int length(SequenceIndex index) const { return index.length; }
  ATTNGEN_HD int first_row(SequenceIndex index) const { return kLongest - index.length; }
  ATTNGEN_HD int first_token(SequenceIndex index) const { return index.start; }
  // Row of the tensor that holds position 0.
  ATTNGEN_HD int first_token(int batch) const { return span(batch).start; }
  // Rows behind the sequence that belong to none, up to the next one that lies in the tensor; before
  // the first sequence, -1, too. None behind one that does not.
  ATTNGEN_HD Range gap(int batch, int sequences) const {
    if (batch >= 0 && !lies(batch)) return {0, 0};
    const Span own = batch < 0 ? Span{0, 0} : span(batch);
    return {own.start + own.length, gap_end(batch, sequences)};
  }
  // Where the next sequence begins that lies in the tensor, else where this ends.
  ATTNGEN_HD int gap_end(int batch, int sequences) const {
    do {
      if (++batch >= sequences) return len;
    } while (!lies(batch));
    return static_cast<const int*>(offsets)[batch];
  }
  // Whether there may be rows that belong to none: unless the first sequence begins where the tensor
  // does, the last one ends where it does, and both lie in it. What that takes is read at once.
  ATTNGEN_HD bool may_have_gaps(int sequences) const {
    const int* ends = static_cast<const int*>(seqlens);
    const int first[] = {ends[0], ends[1]};
    const int last[] = {ends[sequences - 1], ends[sequences]};
    const u32 most = min_of(len, longest);
    return offsets != seqlens || first[0] != 0 || last[1] != len || static_cast<u32>(first[1]) > most ||
           static_cast<u32>(difference(len, last[0])) > most;
  }
  // Place of the tensor's row among floats [heads, len].
  ATTNGEN_HD long long place(int, int row, int head, int) const {
    return static_cast<long long>(head) * len + row;
  }
};
struct UsedSequence {
  int len;
  const void* lengths;
  int least;

  ATTNGEN_HD int length(int batch) const {
    return length_within(max_of(static_cast<const int*>(lengths)[batch], least), len);
  }
  // Where a tensor map that ends where the sequence does has position 0.
  ATTNGEN_HD int first_row(int batch) const { return kLongest - length(batch); }
  ATTNGEN_HD SequenceIndex batch_index(int batch) const { return {length(batch), batch}; }
  // Of one that was found before.
  ATTNGEN_HD int length(SequenceIndex index) const { return index.length; }
  ATTNGEN_HD int first_row(SequenceIndex index) const { return kLongest - index.length; }
  ATTNGEN_HD int first_token(SequenceIndex) const { return 0; }
  // Row of the tensor, at the batch's index, that holds position 0.
  ATTNGEN_HD int first_token(int) const { return 0; }
  // Rows behind the sequence that belong to none; before the first sequence, -1, there are none.
  ATTNGEN_HD Range gap(int batch, int) const { return {batch < 0 ? len : length(batch), len}; }
  ATTNGEN_HD int gap_end(int, int) const { return len; }
  // Whether there may be rows that belong to none.
  ATTNGEN_HD bool may_have_gaps(int) const { return least == 0; }
  // Place of the tensor's row among floats [b, heads, len].
  ATTNGEN_HD long long place(int batch, int row, int head, int heads) const {
    return (static_cast<long long>(batch) * heads + head) * len + row;
  }
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
struct PageFetch {
  const void* page_table;
  int page_table_stride;
  int page_size;
  int page_reciprocal;
  int page_shift;

  // Positions that one copy brings, the largest power of two that divides pages and blocks of
  // kBlock: each lies on one page.
  template <int kBlock>
  ATTNGEN_HD int stretch() const { return min_of(page_size & -page_size, kBlock & -kBlock); }
  // The pages of a sequence.
  ATTNGEN_HD const int* pages(int batch) const {
    return static_cast<const int*>(page_table) + static_cast<long long>(batch) * page_table_stride;
  }
  // Which of them has a position below 2^30.
  ATTNGEN_HD int place(int position) const {
    const u64 product = static_cast<u64>(4 * static_cast<u32>(position)) * static_cast<u32>(page_reciprocal);
    return static_cast<int>(static_cast<u32>(product >> 32) >> page_shift);
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

using QSequence = PackedSequence;
using KvSequence = UsedSequence;
using KvFetch = PageFetch;
using KvIteration = RangeIteration;
using Softmax = VanillaSoftmax;

struct Params {
  SequenceMap map_q;
  PageMap map_k;
  PageMap map_v;
  SequenceMap map_o;
  void* o;
  void* lse;
  void* tile_counter;
  void* q_schedule;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  int tiles;
  int tiles_m;
  int heads_q;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  int group_size;
  int bottom_right;
  float scale_log2;
  int sequences;
  int q_len;
  void* q_seqlens;
  void* q_offsets;
  int q_longest;
  int kv_len;
  void* kv_lengths;
  int kv_least;
  void* k_page_table;
  int k_page_table_stride;
  int k_page_size;
  int k_page_reciprocal;
  int k_page_shift;
  void* v_page_table;
  int v_page_table_stride;
  int v_page_size;
  int v_page_reciprocal;
  int v_page_shift;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 960, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}

ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return UsedSequence{p.kv_len, p.kv_lengths, p.kv_least}; }

ATTNGEN_DEVICE Context tile_context(const Params& p, int batch, int head) {
  const int q_len = q_sequence(p).length(batch);
  const int kv_len = kv_sequence(p).length(batch);
  return {batch, head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}

using KBlocks = PagedBlocks<kTileN, kHeadDimQk, KvFetch>;
using VBlocks = PagedBlocks<kTileN, kHeadDimV, KvFetch>;
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
  int q_length;
  int q_token;
  int kv_length;
  int share;
  int shares;
};
// Where a tensor map has the sequence of a job, or of the slot that it is in.
template <class AnyJob>
ATTNGEN_DEVICE SequenceIndex q_index(const AnyJob& job) { return {job.q_length, job.q_token}; }
template <class AnyJob>
ATTNGEN_DEVICE SequenceIndex kv_index(const AnyJob& job) { return {job.kv_length, job.batch}; }

ATTNGEN_DEVICE Context job_context(const Params& p, const Job& job) {
  const int q_len = q_sequence(p).length(q_index(job));
  const int kv_len = kv_sequence(p).length(kv_index(job));
  return {job.batch, job.head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}

ATTNGEN_DEVICE int query_heads_together(const Params& p, int length) {
  const int groups = min_of(131072 / max_of(length, 1), 32 / p.group_size);
  return min_of(max_of(groups, 1) * p.group_size, p.heads_q);
}

// Writes the schedule of few sequences to shared memory, where no kernel before this one has written
// one: by a whole warp, a lane a sequence.
ATTNGEN_DEVICE void order_few(const Params& p, unsigned char* shared, int lane) {
  if (p.q_schedule) return;
  void* schedule = shared + kSmemOrder;
  const int batch = min_of(lane, p.sequences - 1);
  const int own = q_sequence(p).length(batch);
  const int other = kv_sequence(p).length(batch);
  const int length = lane < p.sequences ? other : -1;
  const int count = lane < p.sequences ? ceil_div(own, 128) : 0;
  int* lengths = static_cast<int*>(schedule);  // until all have their places
  int* tiles = lengths + kFewSequences;
  lengths[lane] = length;
  tiles[lane] = count;
  __syncwarp();
  const OrderPlace at = place_among_few<4>(lengths, tiles, lane);
  const int own_tiles = tiles[lane];  // in no register until here
  __syncwarp();
  write_few<4>(static_cast<ScheduledSequence*>(schedule), at, lane, own_tiles, p.heads_q,
            query_heads_together(p, length));
}
ATTNGEN_DEVICE SequenceOrder find_order(const Params& p, const unsigned char* shared) {
  const void* schedule = p.q_schedule ? p.q_schedule : shared + kSmemOrder;
  return {schedule, p.heads_q};
}

ATTNGEN_DEVICE void fill_gaps(const Params& p, int share, int shares, int lane) {
  const auto queries = q_sequence(p);
  for_each_gap_row(queries, p.sequences, share, shares, lane, [&](int batch, int row) {
    clear_row<256>(p.o, 2 * (static_cast<long long>(row) * p.o_stride_row), 2 * p.o_stride_head, p.heads_q, lane);
    float* lse = static_cast<float*>(p.lse) + queries.place(batch, row, lane, p.heads_q);
#pragma unroll 1
    for (int head = lane; head < p.heads_q; head += 32, lse += 32ll * queries.len) *lse = -kInfinity;
  });
}

// ---- scheduler: one thread that draws tiles and works out their blocks, one tile ahead
struct Scheduler {
  const Params& p;
  u32 smem;
  Job* slot;
  SequenceOrder order;

  ATTNGEN_DEVICE void publish(int index, int tiles) {
    const TileCoord tile = order.at<kLongestFirst, 4>(index);
    // One side after the other, each once: the thread has few registers.
    const SequenceIndex q_place = q_sequence(p).batch_index(forget(tile.batch));
    slot->q_token = q_place.start;
    const int q_len = forget(q_place.length);
    const int kv_len = kv_sequence(p).length(tile.batch);
    const Context ctx = {tile.batch, tile.head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
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
    slot->q_length = ctx.q_len;
    slot->share = index;
    slot->shares = max_of(tiles, static_cast<int>(gridDim.x));
    slot->kv_length = ctx.kv_len;
  }

  ATTNGEN_DEVICE void run() {
    u32 parity = 1;
    int index = blockIdx.x;
    const int tiles = order.tiles();
    while (index < tiles) {
      publish(index, tiles);
      mbarrier_arrive(smem + kJobFull);
      parity ^= 1;
      mbarrier_wait(smem + kJobEmpty, parity);
      // Each tile draws one number; whoever draws the last leaves the counter at zero.
      int* counter = static_cast<int*>(p.tile_counter);
      const int drawn = atomicAdd(counter, 1);
      if (drawn == tiles - 1) atomicExch(counter, 0);
      index = drawn + gridDim.x;
    }
    slot->row_block = -1;
    slot->share = blockIdx.x;
    slot->shares = static_cast<int>(blockIdx.x) < tiles ? 0 : gridDim.x;
    mbarrier_arrive(smem + kJobFull);
  }
};

// ---- loaders: a thread or a warp each for Q, K and V, so that none waits for another's buffer
struct QLoader {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  int lane;

  ATTNGEN_DEVICE void run() const {
    const bool gaps = q_sequence(p).may_have_gaps(p.sequences);
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kJobFull, parity);
      const int row_block = slot->row_block;
      const int head = slot->head;
      const auto index = q_index(*slot);
      const int share = slot->share;
      const int shares = slot->shares;
      if (row_block >= 0) load(row_block, head, index, parity);
      if (gaps && shares > 0) fill_gaps(p, share, shares, lane);
      if (row_block < 0) break;
    }
  }

  ATTNGEN_DEVICE void load(int row_block, int head, SequenceIndex index, u32 parity) const {
    mbarrier_arrive(smem + kJobEmpty);  // every thread: each has read the slot itself
    if (lane > 0) return;
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

// The blocks of K, or of V, of one tile after another into a ring of kStages buffers: by a warp,
// which finds the pages of a block ahead. kTail: a barrier of its own, where what lies behind a
// sequence's end is cleared.
template <class Blocks, int kStages, u32 kTiles, u32 kFull, u32 kEmpty, u32 kTail>
struct PagedLoader {
  static constexpr int kBoxes = Blocks::kBoxes;
  const Params& p;
  KvFetch fetch;
  const PageMap* map;
  u32 smem;
  int lane;

  ATTNGEN_DEVICE void run() const {
    RingPosition<kStages> ring;
    for (u32 parity = 0;; parity ^= 1) {
      mbarrier_wait(smem + kJobFull, parity);
      // Found anew for each tile: a loading warp has few registers.
      const auto* slot = reinterpret_cast<const volatile Job*>(__cvta_shared_to_generic(forget(smem) + kSmemJob));
      const int row_block = slot->row_block;
      const int kv_head = slot->kv_head;
      const int batch = slot->batch;
      const int block_begin = slot->block_begin;
      int block = slot->block_end;
      if (row_block < 0) break;
      mbarrier_arrive(smem + kJobEmpty);  // every lane: each has read the slot itself
      const Blocks blocks(fetch, map, batch, kv_head, kv_sequence(p).length(batch), lane);
      PagedBox box = blocks.find(block - 1);
      // A phase of that barrier a tile, whether there is anything to clear or not.
      if (kTail != 0 && lane == 0 && blocks.rows_of(block - 1) == kTileN) mbarrier_arrive(smem + kTail);
#pragma unroll 1
      while (--block >= block_begin) {
        const u32 tile = smem + kTiles + ring.stage * (kBoxes * kTileN * 128);
        mbarrier_wait(smem + kEmpty + ring.stage * 8, ring.parity ^ 1);
        const bool whole = kTail == 0 || blocks.rows_of(forget(block)) == kTileN;
        blocks.load(box, tile, smem + (whole ? kFull + ring.stage * 8 : kTail), block, kEvictLast);
        if (kTail != 0 && blocks.rows_of(forget(block)) < kTileN) {
          mbarrier_wait(smem + kTail, parity);
          blocks.clear_tail(smem + kTiles + forget(ring.stage) * (kBoxes * kTileN * 128), block);
          if (lane == 0) mbarrier_arrive(smem + kFull + forget(ring.stage) * 8);
        }
        box = blocks.find(block - 1);
        ring.advance();
      }
    }
  }
};
using KLoader = PagedLoader<KBlocks, kKStages, kSmemK, kKFull, kKEmpty, 0>;
using VLoader = PagedLoader<VBlocks, kVStages, kSmemV, kVFull, kVEmpty, kVTail>;

constexpr u32 kKBoxBytes = KBlocks::kBoxBytes, kKGroupBytes = KBlocks::kGroupBytes;
constexpr u32 kVBoxBytes = VBlocks::kBoxBytes, kVGroupBytes = VBlocks::kGroupBytes;

// A thread's part of 64 rows of output.
struct Accumulators {
  float sum[kHeadDimV / 2];
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

  // The warpgroup's queries, in registers for the whole tile: their buffer is free at once, and
  // the products read half as much shared memory.
  using Queries = u32[4 * kQkSteps];

  ATTNGEN_DEVICE void take_queries(Queries& queries) const {
    load_operand<kQkSteps, kRowBoxBytes>(queries, q_tile(), warp, lane);
  }
  ATTNGEN_DEVICE void issue_scores(float (&scores)[kTileN / 2], const Queries& queries) const {
    gemm_register_shared<QkMma, kQkSteps, kKBoxBytes, kKGroupBytes>(scores, queries, k_tile());
  }

  ATTNGEN_DEVICE void issue_output(Accumulators& output, const u32 (&weights)[kWeightRegisters]) const {
    gemm_accumulate<PvMma, kPvSteps, kVBoxBytes, kVGroupBytes>(output.sum, weights, v_tile());
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
    }
  }

  ATTNGEN_DEVICE static void begin_sum(Accumulators& output) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output.sum[i] = 0.f;
  }

  // Computes a block's scores together with the previous block's output, and weighs them. Where far blocks may be
  // passed over: returns whether this one was; kAfterFaint: the previous one was.
  template <bool kMasked>
  ATTNGEN_DEVICE void step(const Queries& queries, float (&scores)[kTileN / 2], Accumulators& output,
                           u32 (&weights)[kWeightRegisters], RowState& state, const Context& ctx, int row,
                           int block) {
    float rescale[2];
    mbarrier_wait(smem + kKFull + k_ring.stage * 8, k_ring.parity);
    issue_scores(scores, queries);
    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights);
    wgmma_wait<1>();
    release_k();
    prepare_scores<kMasked>(scores, ctx, row, block);
    BlockSoftmax<kTileN, kPairSums> softmax = {p.scale_log2, 0.f};
    softmax.bound_maxima(scores);
    const bool grew = softmax.raise_rarely(scores, state, kLazyRescaleLog2, rescale);
    // Some weights while the product before still runs; its sum is rescaled last, and hardly ever.
    softmax.template weigh<kAhead>(scores, state, 0, rescale);
    finish_first(__float_as_uint(state.row_sum[0]));
    await_product();
    softmax.weigh(scores, state, 1, rescale);
    pack_weights<Element, kTileN>(weights, scores);
    rescale_output(output, grew, rescale);
  }

  // Writes LSE and turns the row sums into the factors that normalise the output.
  ATTNGEN_DEVICE void finish_rows(RowState& state, float (&normalizer)[2], const Context& ctx, int row, const Job& job) const {
    const QSequence sequence = q_sequence(p);
    float* lse = static_cast<float*>(p.lse) + sequence.place(ctx.batch, sequence.first_token(q_index(job)), ctx.head, p.heads_q);
    const Softmax softmax = VanillaSoftmax{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = state.row_max[half] * kLn2 * p.scale_log2;
      const SoftmaxRow result = softmax.finalize(ctx, most, quad_sum(state.row_sum[half]));
      normalizer[half] = result.normalizer;
      const int i = row + half * 8;
      if ((lane & 3) == 0 && i < ctx.q_len) lse[i] = result.lse;
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
    RowState state;
    float factor[2];
    begin_sum(output);

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
    BlockSoftmax<kTileN, kPairSums>{p.scale_log2, 0.f}.begin(scores, state, kLazyRescaleLog2);
    pack_weights<Element, kTileN>(weights, scores);
    --block;
    const BlockRange blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, first, max_of(min_of(first + 64, ctx.q_len) - 1, first));
    for (; block >= blocks.full_end && block >= job.block_begin; --block) step<true>(queries, scores, output, weights, state, ctx, row, block);
    const int full_begin = job.block_begin;
    for (; block >= full_begin; --block) step<false>(queries, scores, output, weights, state, ctx, row, block);

    mbarrier_wait(smem + kVFull + v_ring.stage * 8, v_ring.parity);
    issue_output(output, weights);
    finish_rows(state, factor, ctx, row, job);
    if (!kOutputOverQ) await_output_tile();
    wgmma_wait<0>();
    release_v();
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

extern "C" __global__ void __launch_bounds__(384, 1)
sm90_fwd__causal_packed_used_d128_bf16_paged__31b946(const __grid_constant__ attngen::Params p) {
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
      mbarrier_init(smem + kVFull + i * 8, 1);
      mbarrier_init(smem + kVEmpty + i * 8, kConsumers * 4);
    }
    mbarrier_init(smem + kJobFull, 1);
    mbarrier_init(smem + kJobEmpty, kConsumers * 128 + 65 + 31);  // consumers, loaders, and who transposes or widens
    mbarrier_init(smem + kVTail, 1);
    mbarrier_init_fence();
  }
  await_dependency();  // the order of the sequences, and whatever came before
  if (threadIdx.x < 32) order_few(p, shared, lane);
  __syncthreads();
  if (role == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) Scheduler{p, smem, slot, find_order(p, shared)}.run();
    if (warp == 1) QLoader{p, smem, slot, lane}.run();
    if (warp == 2) KLoader{p, PageFetch{p.k_page_table, p.k_page_table_stride, p.k_page_size, p.k_page_reciprocal, p.k_page_shift}, &p.map_k, smem, lane}.run();
    if (warp == 3) VLoader{p, PageFetch{p.v_page_table, p.v_page_table_stride, p.v_page_size, p.v_page_reciprocal, p.v_page_shift}, &p.map_v, smem, lane}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, warp, lane}.run(slot);
  }
}
