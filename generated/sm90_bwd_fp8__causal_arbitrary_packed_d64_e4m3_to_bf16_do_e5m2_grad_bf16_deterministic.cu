// sm90_bwd_fp8__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__ea837b
// Rendered by attngen from kernels/wgmma/backward/fp8.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/mask_bits.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/mma/stage.cuh"
#include "attngen/mma/stage8.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/ptx/turn.cuh"
#include "attngen/scale_gradients.cuh"
#include "attngen/scheduler/gap_rows.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/scheduler/packed_tiles.cuh"
#include "attngen/scheduler/sequence_order.cuh"
#include "attngen/scheduler/tile_order.cuh"
#include "attngen/softmax/transposed.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 64;
constexpr int kHeadDimV = 64;
using Weight = E4m3;            // what P is stored as
using ScoreGradient = E5m2;  // what dS is stored as
using Gradient = Bf16;

// ---- the plan
constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kStages = 2;  // of all that blocks have
constexpr int kQkSteps = ceil_div(kHeadDimQk, 32);
constexpr int kHeldSteps = 0;  // of keys, which consumers have in registers
constexpr int kVSteps = ceil_div(kHeadDimV, 32);
constexpr u32 kQueryBoxBytes = kTileM * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kWarpgroupBytes = 64 * 128;
constexpr u32 kRowBytes = kTileM * 4;  // one float a query
// Queries and output gradients of a block, transposed: rows have both, the latter behind the others. Keys of a tile.
constexpr u32 kTurnedBytes = 8192;
constexpr u32 kTurnedDo = kTileM;
constexpr u32 kTurnedKeyBytes = 8192;
// Columns of dQ that a warpgroup holds in 64 rows.
constexpr int kDqColumns = 32;
constexpr u32 kDqBytes = 64 * kDqColumns * 4;
constexpr int kGradientColumns = 64;  // of a box
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemDo = 16384;
constexpr u32 kSmemTurned = 32768;
constexpr u32 kSmemK = 49152;
constexpr u32 kSmemV = 65536;
constexpr u32 kSmemKt = 81920;
constexpr u32 kSmemDs = 90112;
constexpr u32 kSmemDq = 106496;
constexpr u32 kSmemDv = 122880;
constexpr u32 kSmemDk = 139264;
constexpr u32 kSmemFactors = 155648;
constexpr u32 kSmemLse = 155664;
constexpr u32 kSmemD = 156176;
constexpr u32 kSmemBarriers = 156688;
constexpr u32 kSmemJob = 156896;
constexpr u32 kJobBytes = 20;
constexpr u32 kSmemOrder = 156928;

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
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[2], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %36, 0;\n"
        "mov.b64 a, {%32, %37};\nmov.b64 b, {%34, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%33, %37};\nmov.b64 b, {%35, %38};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(1024)), "n"(descriptor_high(kGroupBytes)));
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

// acc[64 x 64] (+)= A B^T, A (e5m2) in registers, B (e4m3) in shared memory with the reduction along its rows.
struct DkMma {
  static constexpr int kN = 64;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[32], const u32 (&a)[8], const u32 (&b)[2], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %42, 0;\n"
        "mov.b64 b, {%40, %43};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1;\n"
        "mov.b64 b, {%41, %43};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%36, %37, %38, %39}, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]), "r"(accumulate), "n"(descriptor_high(kGroupBytes)));
  }
};

// acc[64 x 32] (+)= A B^T, A (e5m2) and B (e4m3) in shared memory with the reduction along their rows.
struct DqMma {
  static constexpr int kN = 32;
  template <u32 kGroupBytes>
  ATTNGEN_DEVICE static void issue(float (&acc)[16], const u32 (&a)[4], const u32 (&b)[4], int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %24, 0;\n"
        "mov.b64 a, {%16, %25};\nmov.b64 b, {%20, %26};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, a, b, p, 1, 1;\n"
        "mov.b64 a, {%17, %25};\nmov.b64 b, {%21, %26};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%18, %25};\nmov.b64 b, {%22, %26};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, a, b, 1, 1, 1;\n"
        "mov.b64 a, {%19, %25};\nmov.b64 b, {%23, %26};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, a, b, 1, 1, 1;\n"
        "}"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15])
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

using QSequence = PackedSequence;
using KvSequence = PackedSequence;
using KvFetch = TmaFetch;

struct Params {
  SequenceMap map_q;
  SequenceMap map_k;
  SequenceMap map_v;
  SequenceMap map_d_o;
  SequenceMap map_dk;
  SequenceMap map_dv;
  void* lse_log2;
  void* d;
  void* dq_acc;
  void* tile_counter;
  void* turns;
  void* queries_turned;
  void* keys_turned;
  void* kv_schedule;
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
  void* mask_columns;
  long long mask_columns_stride_batch;
  long long mask_columns_stride_head;
  long long mask_columns_stride_row;
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
  int sequences;
  void* dq;
  long long dq_stride_row;
  long long dq_stride_head;
  long long dq_stride_batch;
  void* dk;
  long long dk_stride_row;
  long long dk_stride_head;
  long long dk_stride_batch;
  void* dv;
  long long dv_stride_row;
  long long dv_stride_head;
  long long dv_stride_batch;
  int q_len;
  void* q_seqlens;
  void* q_offsets;
  int q_longest;
  int kv_len;
  void* kv_seqlens;
  void* kv_offsets;
  int kv_longest;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 1600, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}

ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return PackedSequence{p.kv_len, p.kv_seqlens, p.kv_offsets, p.kv_longest}; }

ATTNGEN_DEVICE Context tile_context(const Params& p, int batch, int head) {
  const int q_len = q_sequence(p).length(batch);
  const int kv_len = kv_sequence(p).length(batch);
  return {batch, head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}
// The context of a tile at a block that it visits: both sequences lie in their tensors then, and are as long as they
// say.
ATTNGEN_DEVICE Context visiting_context(const Params& p, int batch, int head) {
  const int q_len = q_sequence(p).claim(batch).length;
  const int kv_len = kv_sequence(p).claim(batch).length;
  return {batch, head, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
}

// Where a block's rows lie in the workspaces: a number of blocks from their start.
ATTNGEN_DEVICE long long workspace_block(const Params& p, int batch, int head, int block, int first_token) {
  return static_cast<long long>(head) * p.q_blocks + PackedTiles<64, QSequence>::first_of(first_token, batch) + block;
}
ATTNGEN_DEVICE long long workspace_block(const Params& p, int batch, int head, int block) {
  return workspace_block(p, batch, head, block, q_sequence(p).first_token(batch));
}

// The bits of a thread's two rows, `row` and 8 below it, in a tile of kN columns.
template <int kN>
ATTNGEN_DEVICE MaskBits<kN> load_mask_bits(const Params& p, int batch, int head, int row, int rows, int column, int lane) {
  const u32* bits = static_cast<const u32*>(p.mask_columns) + batch * p.mask_columns_stride_batch + head * p.mask_columns_stride_head;
  MaskBits<kN> found;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    found.load(half, bits + min_of(row + half * 8, rows - 1) * p.mask_columns_stride_row, column, lane);
  }
  return found;
}
template <int kN>
ATTNGEN_DEVICE void hide_unseen(float (&scores)[kN / 2], const MaskBits<kN>& bits) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) scores[i] = bits.sees(i) ? scores[i] : -kInfinity;
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

ATTNGEN_DEVICE int key_heads_together(const Params& p, int length) {
  const int fitting = 524288 / p.group_size / max_of(length, 1);
  return max_of(min_of(min_of(fitting, 8), p.heads_kv), 1);
}

// Writes the schedule of few sequences to shared memory, where no kernel before this one has written
// one: by a whole warp, a lane a sequence.
ATTNGEN_DEVICE void order_few(const Params& p, unsigned char* shared, int lane) {
  if (p.kv_schedule) return;
  void* schedule = shared + kSmemOrder;
  const int batch = min_of(lane, p.sequences - 1);
  const int own = kv_sequence(p).length(batch);
  const int other = q_sequence(p).length(batch);
  const int length = lane < p.sequences ? other : -1;
  const int count = lane < p.sequences ? ceil_div(own, 128) : 0;
  int* lengths = static_cast<int*>(schedule);  // until all have their places
  int* tiles = lengths + kFewSequences;
  lengths[lane] = length;
  tiles[lane] = count;
  __syncwarp();
  const OrderPlace at = place_among_few<0>(lengths, tiles, lane);
  const int own_tiles = tiles[lane];  // in no register until here
  __syncwarp();
  write_few<0>(static_cast<ScheduledSequence*>(schedule), at, lane, own_tiles, p.heads_kv,
            key_heads_together(p, length));
}
ATTNGEN_DEVICE SequenceOrder find_order(const Params& p, const unsigned char* shared) {
  const void* schedule = p.kv_schedule ? p.kv_schedule : shared + kSmemOrder;
  return {schedule, p.heads_kv};
}

// Fills rows of gradients that belong to no sequence: one share of so many.
ATTNGEN_DEVICE void fill_gaps(const Params& p, int share, int shares, int lane) {
  if (p.dq && q_sequence(p).may_have_gaps(p.sequences)) {
    for_each_gap_row(q_sequence(p), p.sequences, share, shares, lane, [&](int batch, int row) {
      clear_row<128>(p.dq, 2 * (static_cast<long long>(row) * p.dq_stride_row), 2 * p.dq_stride_head, p.heads_q, lane);
    });
  }
  if (kv_sequence(p).may_have_gaps(p.sequences)) {
    for_each_gap_row(kv_sequence(p), p.sequences, share, shares, lane, [&](int batch, int row) {
      clear_row<128>(p.dk, 2 * (static_cast<long long>(row) * p.dk_stride_row), 2 * p.dk_stride_head, p.heads_kv, lane);
      clear_row<128>(p.dv, 2 * (static_cast<long long>(row) * p.dv_stride_row), 2 * p.dv_stride_head, p.heads_kv, lane);
    });
  }
}

// ---- scheduler: one thread that draws tiles, works out their blocks, and has what a tile keeps loaded; where a lane
// is kept, its whole warp fills rows of gradients that belong to no sequence, meanwhile
struct Scheduler {
  const Params& p;
  u32 smem;
  Job* slot;
  SequenceOrder order;
  int lane;

  ATTNGEN_DEVICE void publish(int index) {

    const TileCoord tile = order.at<false, 0>(index);
    // Known facts leave at once, and one length is found after the other: the thread has few registers.
    slot->tile = tile.row_block;
    slot->head = tile.head;
    slot->batch = tile.batch;
    const int q_len = q_sequence(p).length(tile.batch);
    const int kv_len = kv_sequence(p).length(forget(tile.batch));
    const Context ctx = {tile.batch, tile.head * p.group_size, q_len, kv_len, p.bottom_right ? kv_len - q_len : 0};
    const int first = tile.row_block * kTileN;
    const int last = min_of(first + kTileN, ctx.kv_len) - 1;
    const BlockRange blocks = q_block_range<kTileM>(mask_list(p), ctx, first, last);
    slot->block_begin = blocks.begin;
    slot->block_end = blocks.end;
  }

  // Each tile draws one number, and where tiles are ordered each CTA one more; whoever draws the last leaves the counter
  // at zero.
  // Tiles wait for those before them, so a CTA draws its first one, too: those before it are then those of CTAs
  // that run. By its own number one that waits for an SM, which another kernel has, would hold up all others.
  ATTNGEN_DEVICE int draw(int tiles) const {
    int* counter = static_cast<int*>(p.tile_counter);
    const int drawn = atomicAdd(counter, 1);
    if (drawn == tiles + static_cast<int>(gridDim.x) - 1) atomicExch(counter, 0);
    return drawn;
  }

  // `load(job)` fetches the tile once its place is free.
  template <class Loader>
  ATTNGEN_DEVICE void run(Loader load) {
    const int tiles = order.tiles();
    // Each tile fills a share, and each CTA that has none.
    const int shares = max_of(tiles, static_cast<int>(gridDim.x));
    int index = __shfl_sync(~0u, lane == 0 ? draw(tiles) : 0, 0);
    for (u32 parity = 0; index < shares; parity ^= 1) {
      if (lane == 0 && index < tiles) {
        publish(index);
        mbarrier_arrive(smem + kJobFull);
        load(*slot);  // before the filling: tiles are drawn as late as that
      }
      __syncwarp();
      fill_gaps(p, index, shares, lane);
      if (index >= tiles) break;
      int drawn = 0;
      if (lane == 0) {
        mbarrier_wait(smem + kJobEmpty, parity);
        drawn = draw(tiles);
      }
      index = __shfl_sync(~0u, drawn, 0);
    }
    if (lane > 0) return;
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

// Goes on to what is visited next; false where that was the last.
ATTNGEN_DEVICE bool next_block(const Params& p, const Job& job, int& head, int& block) {
  const int first_head = job.head * p.group_size;
  if (++head < first_head + p.group_size) return true;
  head = first_head;
  return --block >= job.block_begin;
}
// Visits blocks of queries for the query heads of a tile's group.
template <class Visitor>
ATTNGEN_DEVICE void for_each_block(const Params& p, const Job& job, Visitor visit) {
  // Where tiles add in an order, each begins with the last block, for all heads: so no tile waits for one before it that
  // has more blocks to visit. In waves that begin with the first block, those before it are ahead.
  // A loop over heads inside one over blocks, which mostly goes round once, measured up to 10 % slower
  // than one loop.
  int head = job.head * p.group_size;
  int block = job.block_end - 1;
  if (job.block_begin >= job.block_end) return;
#pragma unroll 1
  do {
    visit(head, block);
  } while (next_block(p, job, head, block));
}

// Loads a float a query of a block, from a workspace.
ATTNGEN_DEVICE void load_row(u32 place, const void* workspace, long long at, u32 full) { bulk_load(place, static_cast<const float*>(workspace) + at, kRowBytes, full); }

// The place of a tile of keys among those of all sequences and heads.
ATTNGEN_DEVICE long long key_tile_place(const Params& p, int batch, int head, int tile) {
  const int place = PackedTiles<kTileN, KvSequence>{kv_sequence(p), p.sequences}.first(batch) + tile;
  return static_cast<long long>(head) * p.kv_blocks + place;
}
// ---- loaders: the tile's keys and values, by the scheduler's thread
struct KvLoader {
  const Params& p;
  u32 smem;
  u32 parity = 1;

  ATTNGEN_DEVICE void load(u32 place, const SequenceMap* map, u32 full, const Job& job) const {
    const SequenceIndex batch = kv_sequence(p).batch_index(job.batch);
    const int row = kv_sequence(p).first_row(batch) + job.tile * kTileN;
    mbarrier_wait(full + 8, parity);
    mbarrier_arrive_expect(full, kKeyBoxBytes);
    KvFetch::load<1, 128>(place, kKeyBoxBytes, map, full, row, job.head, batch, kEvictFirst);
  }
  ATTNGEN_DEVICE void operator()(const Job& job) {
    load(smem + kSmemK, &p.map_k, smem + kKFull, job);
    load(smem + kSmemV, &p.map_v, smem + kVFull, job);
    mbarrier_wait(smem + kKtEmpty, parity);
    await_dependency();  // the kernel before lays them down
    mbarrier_arrive_expect(smem + kKtFull, kTurnedKeyBytes);
    const char* keys = static_cast<const char*>(p.keys_turned) + key_tile_place(p, job.batch, job.head, job.tile) * kTurnedKeyBytes;
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
    const SequenceIndex batch = q_sequence(p).batch_index(job.batch);
    const int row = q_sequence(p).first_row(batch) + block * kTileM;
    const long long at = workspace_block(p, job.batch, head, block, batch.start);
    const u32 full = smem + kQFull + ring.stage * 8;
    mbarrier_wait(smem + kQEmpty + ring.stage * 8, ring.parity ^ 1);
    mbarrier_arrive_expect(full, 2 * kQueryBoxBytes + 2 * kRowBytes);
    TmaFetch::load<1, 128>(smem + kSmemQ + ring.stage * kQueryBoxBytes, kQueryBoxBytes, &p.map_q, full, row, head, batch, kEvictLast);
    TmaFetch::load<1, 128>(smem + kSmemDo + ring.stage * kQueryBoxBytes, kQueryBoxBytes, &p.map_d_o, full, row, head, batch, kEvictLast);
    load_row(smem + kSmemLse + ring.stage * kRowBytes, p.lse_log2, at * kTileM, full);
    load_row(smem + kSmemD + ring.stage * kRowBytes, p.d, at * kTileM, full);
    const u32 turned_full = smem + kTurnedFull + ring.stage * 8;
    mbarrier_wait(smem + kTurnedEmpty + ring.stage * 8, ring.parity ^ 1);
    mbarrier_arrive_expect(turned_full, kTurnedBytes);
    const char* turned = static_cast<const char*>(p.queries_turned) + at * kTurnedBytes;
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
// starts. Tiles have their turns at a block in the order in which they are drawn, from the first keys to the last, or back.
struct Reducer {
  const Params& p;
  u32 smem;
  const volatile Job* slot;
  u32 turn;
  bool ready = false;  // whether the turn at the block that comes next is known to have come

  ATTNGEN_DEVICE int* turns_at(const Job& job, int head, int block) const {
    return static_cast<int*>(p.turns) + workspace_block(p, job.batch, head, block);
  }
  // The turns of others before the tile's at a block. Sequences that lie over each other count up the same.
  ATTNGEN_DEVICE int turns_before(const Job& job, int head, int block) const {
    const Context ctx = visiting_context(p, job.batch, head);
    const int row = block * kTileM;
    const int last_row = min_of(row + kTileM, ctx.q_len) - 1;
    const BlockRange tiles = kv_block_range<kTileN>(mask_list(p), ctx, row, last_row);
    return job.tile - tiles.begin;
  }
  // Whether the tile's turn has come at this thread's next block.
  ATTNGEN_DEVICE bool looks_ahead(const Job& job, int head, int block) const {
    if (!next_block(p, job, head, block) || !next_block(p, job, head, block)) return false;
    return has_reached(turns_at(job, head, block), turns_before(job, head, block));
  }

  ATTNGEN_DEVICE void add(const Job& job, int head, int block, u32 parity) {
    float* sums = static_cast<float*>(p.dq_acc) + workspace_block(p, job.batch, head, block) * (kConsumers * kDqBytes / 4);
    int* turns = turns_at(job, head, block);
    const int before = turns_before(job, head, block);
    if (!ready) await_reached(turns, before);
#pragma unroll
    for (u32 part = 0; part < kConsumers; ++part) {
      mbarrier_wait(smem + kDqFull + (turn * kConsumers + part) * 8, parity);
      const u32 source = smem + kSmemDq + part * kDqBytes;
      if (before == 0) {
        bulk_store(sums + part * (kDqBytes / 4), source, kDqBytes);
      } else {
        bulk_add(sums + part * (kDqBytes / 4), source, kDqBytes);
      }
      tma_store_commit();
    }
    tma_store_wait_read<1>();
    mbarrier_arrive(smem + kDqEmpty);
    ready = looks_ahead(job, head, block);  // while additions are on their way
    tma_store_wait_read();
    mbarrier_arrive(smem + kDqEmpty + 8);
    tma_store_wait();
    count_up(turns);
  }

  ATTNGEN_DEVICE void run() {
    static_assert(kConsumers == 2, "a part is freed before the other");
    await_dependency();
    RingPosition<2> ring;
    for_each_job(smem, slot, [&](const Job& job) {
      for_each_block(p, job, [&](int head, int block) {
        if (ring.stage == turn) add(job, head, block, ring.parity);
        ring.advance();
      });
    });
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
  int query_head = 0;  // that at hand
  RingPosition<kStages> ring;  // of the block at hand, in all that blocks have: a step advances all of it

  using Scores = float[kTileM / 2];
  using Packed = u32[kTileM / 8];
  using Dq = float[kDqColumns / 2];
  using HeldKeys = u32[4 * max_of(kHeldSteps, 1)];
  struct Gradients {
    float dk[DkMma::kN / 2];
    float dv[DvMma::kN / 2];
  };

  ATTNGEN_DEVICE u32 queries() const { return smem + kSmemQ + ring.stage * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 output_gradients() const { return smem + kSmemDo + ring.stage * kQueryBoxBytes; }
  ATTNGEN_DEVICE u32 turned() const { return smem + kSmemTurned + ring.stage * kTurnedBytes; }
  static_assert(kStages == 2, "the block before is in the other stage");
  ATTNGEN_DEVICE u32 last_stage() const { return ring.stage ^ 1; }
  ATTNGEN_DEVICE u32 last_parity() const { return ring.parity ^ ring.stage ^ 1; }

  ATTNGEN_DEVICE u32 keys() const { return smem + kSmemK + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 values() const { return smem + kSmemV + warpgroup * kWarpgroupBytes; }
  ATTNGEN_DEVICE u32 score_gradients(u32 stage) const { return smem + kSmemDs + stage * kQueryBoxBytes; }
  // Where the thread's first two of a block's LSE or D lie.
  ATTNGEN_DEVICE u32 query_row(u32 region) const { return smem + region + ring.stage * kRowBytes + (lane & 3) * 8; }

  ATTNGEN_DEVICE void hide(Scores& scores, const Context& tile, int key, int block) const {
    // Lengths read anew: across the unmasked blocks no register has room for them.
    const Context ctx = visiting_context(p, tile.batch, tile.head);
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
    gemm_shared_shared<ScoreMma, kQkSteps, kKeyBoxBytes, kQueryBoxBytes>(scores, keys(), queries());
    wgmma_wait<0>();
    settle(scores);
    const MaskBits<kTileM> seen = load_mask_bits<kTileM>(p, ctx.batch, query_head, key, ctx.kv_len, block * kTileM, lane);
    if (masked) hide(scores, ctx, key, block);
    hide_unseen<kTileM>(scores, seen);
    weigh(scores, packed_weights);
    // Weights are worked out here, not below the wait: their scores' registers are the gradients'.
    u32 every = 0;
#pragma unroll
    for (const u32 weights : packed_weights) every ^= weights;
    finish_first(every);
    gemm_shared_shared<GradientMma, kVSteps, kKeyBoxBytes, kQueryBoxBytes>(gradients, values(), output_gradients());
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
  // The gradients of the tile before have been read where they were staged.
  ATTNGEN_DEVICE void await_stores() const {
    if (warp == 0 && lane == 0) tma_store_wait_read();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
  }
  // Stages 64 rows of a gradient whose sums times `factor` it is, and notes the largest. scale: by which it is multiplied
  // to be stored.
  template <int kN>
  ATTNGEN_DEVICE void stage(u32 tile, const float (&sums)[kN / 2], float factor, void* amax) const {
    if (amax) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) most = fmaxf(most, fabsf(sums[i]));
      atomic_max(static_cast<float*>(amax), warp_max(most) * factor, lane);
    }
    stage_rows<Gradient, kN, kKeyBoxBytes>(tile, sums, factor, warp, lane);
  }
  ATTNGEN_DEVICE void stage_dv(const Gradients& sums) const {
    await_stores();
    const float factor = limited(descale_of_weights(p.descale_s, 0x1p8f) * read_scale(p.descale_do, 0));
    stage<DvMma::kN>(smem + kSmemDv + warpgroup * kWarpgroupBytes, sums.dv, factor, p.amax_dv);
  }
  ATTNGEN_DEVICE void stage_dk(const Gradients& sums) const {
    const float factor = limited(read_scale(p.descale_dp, 0) * read_scale(p.descale_q, 0));
    stage<DkMma::kN>(smem + kSmemDk + warpgroup * kWarpgroupBytes, sums.dk, factor, p.amax_dk);
  }
  template <int kBoxes>
  ATTNGEN_DEVICE void store(u32 tile, const SequenceMap* map, const Job& job) const {
    const SequenceIndex index = kv_sequence(p).batch_index(job.batch);
    const int row = kv_sequence(p).first_row(index) + job.tile * kTileN + warpgroup * 64;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      tma_store(map, tile + warpgroup * kWarpgroupBytes + box * kKeyBoxBytes, box * kGradientColumns, row, job.head, index);
    }
  }
  // Stores both gradients from where they are staged.
  ATTNGEN_DEVICE void leave(const Job& job) const {
    fence_async_shared();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (warp == 0 && lane == 0) {
      store<ceil_div(kHeadDimV, kGradientColumns)>(smem + kSmemDv, &p.map_dv, job);
      store<ceil_div(kHeadDimQk, kGradientColumns)>(smem + kSmemDk, &p.map_dk, job);
      tma_store_commit();
    }
  }
  ATTNGEN_DEVICE void run_tile(const Job& job, u32 parity) {
    const Context ctx = tile_context(p, job.batch, job.head * p.group_size);
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
    HeldKeys held;
    mbarrier_wait(smem + kVFull, parity);
    const int key = first + warp * 16 + lane / 4;
    bool first_step = true;
    for_each_block(p, job, [&](int head, int block) {
      query_head = head;
      step(sums, held, ctx, key, block, block < blocks.full_begin || block >= blocks.full_end, first_step);
      if (first_step) mbarrier_wait(smem + kKtFull, parity);  // for dQ, with the next block
      first_step = false;
    });
    if (first_step) mbarrier_wait(smem + kKtFull, parity);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem + kVEmpty);
    if (lane == 0) mbarrier_arrive(smem + kKEmpty);
    if (first_step) {
      stage_dv(sums);
    } else {
      Dq dq;
      issue_dq(dq);
      stage_dv(sums);
      wgmma_wait<0>();
      finish_dq(dq);
    }
    if (lane == 0) mbarrier_arrive(smem + kKtEmpty);
    stage_dk(sums);
    leave(job);
  }

  ATTNGEN_DEVICE void run(const volatile Job* slot) {
    if (warpgroup == kConsumers - 1) named_barrier_arrive(kTurnBarrier, 256);
    u32 parity = 0;
    for_each_job(smem, slot, [&](const Job& job) {
      run_tile(job, parity);
      parity ^= 1;
    });
    if (p.amax_dp) atomic_max(static_cast<float*>(p.amax_dp), warp_max(largest) / stored_scale(read_scale(p.scale_dp, 0)), lane);
    if (warp == 0 && lane == 0) tma_store_wait();
  }
};

}  // namespace attngen

extern "C" __global__ void __launch_bounds__(384, 1)
sm90_bwd_fp8__causal_arbitrary_packed_d64_e4m3_to_bf16_do_e5m2_grad_bf16_deterministic__ea837b(const __grid_constant__ attngen::Params p) {
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
    if (threadIdx.x < 32) order_few(p, shared, threadIdx.x);  // which the scheduler's warp alone reads
    __syncwarp();
    if (threadIdx.x < 32) Scheduler{p, smem, slot, find_order(p, shared), static_cast<int>(threadIdx.x)}.run(KvLoader{p, smem});
    if (threadIdx.x == 32) QueryLoader{p, smem, slot}.run();
    if (threadIdx.x == 64 || threadIdx.x == 96) Reducer{p, smem, slot, threadIdx.x / 32 % 2}.run();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer{p, smem, role - 1, static_cast<int>(threadIdx.x % 128 / 32), static_cast<int>(threadIdx.x % 32)}.run(slot);
  }
}
