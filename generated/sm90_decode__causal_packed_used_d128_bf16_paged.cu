// sm90_decode__causal_packed_used_d128_bf16_paged__367fdb
// Rendered by attngen from kernels/wgmma/decode/decode.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/copy/paged_blocks.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/mma/gemm.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/packed_tiles.cuh"
#include "attngen/scheduler/splits.cuh"
#include "attngen/softmax/online.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
using Element = Bf16;

// ---- the plan
constexpr int kRows = 64;
constexpr int kTileN = 64;
constexpr int kStages = 3;
constexpr int kConsumers = 1;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kColumns = 128;  // of the output, a warpgroup's: of two in whole boxes
constexpr int kQkSteps = ceil_div(kHeadDimQk, 16);
constexpr int kQkBoxes = ceil_div(kHeadDimQk, 64);
constexpr int kVBoxes = ceil_div(kHeadDimV, 64);
constexpr u32 kRowBoxBytes = kRows * 128;
constexpr u32 kKeyBoxBytes = kTileN * 128;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 16384;
constexpr u32 kSmemV = 65536;
constexpr u32 kSmemBarriers = 114688;
constexpr u32 kKFull = kSmemBarriers;
constexpr u32 kKEmpty = kKFull + 8 * kStages;
constexpr u32 kVFull = kKEmpty + 8 * kStages;
constexpr u32 kVEmpty = kVFull + 8 * kStages;

// Stages in use: all where each CTA has an SM to itself.
ATTNGEN_DEVICE u32 used_stages() { return gridDim.x * gridDim.y > multiprocessors() ? 2 : kStages; }

// Whether many SMs have two CTAs, and many one.
ATTNGEN_DEVICE bool shared_unevenly() {
  const u32 ctas = gridDim.x * gridDim.y;
  return ctas * 8 > multiprocessors() * 9 && ctas * 8 < multiprocessors() * 15;
}

// Named barriers: 0 is __syncthreads.
constexpr u32 kConsumersBarrier = 1;
constexpr u32 kReadyBarrier = 2;  // of the warp that makes mbarriers and the one that waits first

// acc[64 x 64] (+)= A B^T, both in shared memory, the reduction along A's rows and along B's.
struct QkMma {
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
struct PvMma {
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
  PageMap map_k;
  PageMap map_v;
  void* q;
  void* o;
  void* lse;
  void* o_parts;
  void* lse_parts;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long total_rows;
  int row_tiles;
  int heads_q;
  int heads_kv;
  int group_size;
  int splits;
  int bottom_right;
  int sequences;
  float scale_log2;
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
static_assert(sizeof(Params) == 640, "packed by the host");

// Places of a block's boxes and groups of rows, as a product finds them.
using KBlocks = PagedBlocks<kTileN, kHeadDimQk, KvFetch>;
using VBlocks = PagedBlocks<kTileN, kHeadDimV, KvFetch>;
constexpr u32 kKBoxBytes = KBlocks::kBoxBytes, kKGroupBytes = KBlocks::kGroupBytes;
constexpr u32 kVBoxBytes = VBlocks::kBoxBytes, kVGroupBytes = VBlocks::kGroupBytes;

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {CausalMask{}};
}
ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return PackedSequence{p.q_len, p.q_seqlens, p.q_offsets, p.q_longest}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return UsedSequence{p.kv_len, p.kv_lengths, p.kv_least}; }

// A CTA's job: rows of one key/value head of one sequence, and blocks of keys.
struct Job {
  int batch;
  int kv_head;
  int first_row;  // of the sequence's queries times the group's heads, a query's heads together
  int first_token;  // row of the tensor that holds query 0
  int split;
  int q_len;
  int kv_len;
  int delta;
  BlockRange blocks;
  int begin;  // of this split
  int end;

  ATTNGEN_DEVICE Context context(int head) const { return {batch, head, q_len, kv_len, delta}; }
};

ATTNGEN_DEVICE Job find_job(const Params& p) {
  Job job;
  const int tile = blockIdx.x / p.heads_kv;
  const QSequence queries = q_sequence(p);
  const PackedTiles<kRows, QSequence> tiles = {queries, p.sequences, p.group_size};
  job.batch = tiles.sequence_of(tile);
  const int within = tile - tiles.first(job.batch);
  job.first_token = queries.first_token(job.batch);
  job.kv_head = blockIdx.x % p.heads_kv;
  job.split = blockIdx.y;
  job.q_len = queries.length(job.batch);
  // Tiles before the first sequence have rows that are no one's, like those behind another's.
  job.first_row = within < 0 ? job.q_len * p.group_size + kRows : within * kRows;
  job.kv_len = kv_sequence(p).length(job.batch);
  job.delta = p.bottom_right ? job.kv_len - job.q_len : 0;
  const int last_row = min_of(job.first_row + kRows, job.q_len * p.group_size) - 1;
  const Context ctx = job.context(job.kv_head * p.group_size);
  job.blocks = KvIteration::blocks<kTileN>(mask_list(p), ctx, job.first_row / p.group_size, max_of(last_row, 0) / p.group_size);
  const Range mine = split_range({job.blocks.begin, job.blocks.end}, job.split, p.splits);
  job.begin = mine.lo;
  job.end = last_row < job.first_row ? mine.lo : max_of(mine.hi, mine.lo);
  return job;
}

// ---- loader: a warp whose lanes each bring a box
struct Loader {
  const Params& p;
  const Job& job;
  u32 smem;
  int lane;

  ATTNGEN_DEVICE void run() const {
    if (lane == 0) {
      tma_prefetch_map(&p.map_k);
      tma_prefetch_map(&p.map_v);
    }
    RingPosition<kStages> ring;
    const u32 stages = used_stages();
    const bool together = shared_unevenly();
    const KBlocks k_blocks(PageFetch{p.k_page_table, p.k_page_table_stride, p.k_page_size, p.k_page_reciprocal, p.k_page_shift}, &p.map_k, job.batch, job.kv_head, job.kv_len, lane);
    const VBlocks v_blocks(PageFetch{p.v_page_table, p.v_page_table_stride, p.v_page_size, p.v_page_reciprocal, p.v_page_shift}, &p.map_v, job.batch, job.kv_head, job.kv_len, lane);
    // A block ahead, so that no copy waits for the table.
    PagedBox k_box = k_blocks.find(job.begin);
    PagedBox v_box = v_blocks.find(job.begin);
    named_barrier_sync(kReadyBarrier, 64);
#pragma unroll 1
    for (int block = job.begin; block < job.end; ++block) {
      const u32 keys = smem + kSmemK + ring.stage * kQkBoxes * kKeyBoxBytes;
      const u32 values = smem + kSmemV + ring.stage * kVBoxes * kKeyBoxBytes;
      mbarrier_wait(smem + kKEmpty + ring.stage * 8, ring.parity ^ 1);
      if (together) mbarrier_wait(smem + kVEmpty + ring.stage * 8, ring.parity ^ 1);
      k_blocks.load(k_box, keys, smem + kKFull + ring.stage * 8, block, kEvictFirst);
      k_box = k_blocks.find(block + 1);
      mbarrier_wait(smem + kVEmpty + ring.stage * 8, ring.parity ^ 1);
      v_blocks.load(v_box, values, smem + kVFull + ring.stage * 8, block, kEvictFirst);
      v_box = v_blocks.find(block + 1);
      ring.advance(stages);
    }
  }
};

// ---- consumer: 64 rows, of whose output each warpgroup has its share of the columns
struct Consumer {
  const Params& p;
  const Job& job;
  u32 smem;
  int warp;
  int lane;

  ATTNGEN_DEVICE int first_column() const { return kConsumers > 1 ? warp / 4 * kColumns : 0; }
  // The query and the head of row `row` of the tile.
  ATTNGEN_DEVICE int query(int row) const { return (job.first_row + row) / p.group_size; }
  ATTNGEN_DEVICE int head(int row) const { return job.kv_head * p.group_size + (job.first_row + row) % p.group_size; }

  // Queries to swizzled boxes of 64 columns; rows past the end are zeros.
  ATTNGEN_DEVICE void load_queries() const {
    constexpr int kChunks = kQkBoxes * 8;  // of 16 bytes
    for (int i = warp * 32 + lane; i < kRows * kChunks; i += kConsumerThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const int at = query(row);
      u32 x[4] = {0, 0, 0, 0};
      if (at < job.q_len && chunk * 8 < kHeadDimQk) {
        const char* source = static_cast<const char*>(p.q) + 2 * (job.batch * p.q_stride_batch + (job.first_token + at) * p.q_stride_row + head(row) * p.q_stride_head + chunk * 8);
        const uint4 loaded = *reinterpret_cast<const uint4*>(source);
        x[0] = loaded.x, x[1] = loaded.y, x[2] = loaded.z, x[3] = loaded.w;
      }
      store_shared_x4(smem + kSmemQ + chunk / 8 * kRowBoxBytes + row * 128 + ((chunk ^ row) & 7) * 16, x);
    }
    fence_async_shared();
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);
  }

  template <class Visit>
  ATTNGEN_DEVICE void mask(float (&scores)[kTileN / 2], int block, Visit keep_range) const {
    const int column = block * kTileN + (lane & 3) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range range = keep_range(half);
      const int lo = range.lo - column;
      const int hi = range.hi - column;
#pragma unroll
      for (int k = 0; k < kTileN / 4; ++k) {
        const int i = fragment_index(half, k);
        if (fragment_column(i) < lo || fragment_column(i) >= hi) scores[i] = -kInfinity;
      }
    }
  }

  // Values past the sequence's end must not reach a product: 0 x NaN is NaN.
  ATTNGEN_DEVICE void clear_tail(u32 tile, int rows) const {
    const u32 zero[4] = {0, 0, 0, 0};
    for (int i = rows * 8 + warp * 32 + lane; i < kTileN * 8; i += kConsumerThreads) {
#pragma unroll
      for (int box = 0; box < kVBoxes; ++box) store_shared_x4(tile + i / 64 * kVGroupBytes + box * kVBoxBytes + i % 64 * 16, zero);
    }
    fence_async_shared();
    named_barrier_sync(kConsumersBarrier, kConsumerThreads);
  }

  ATTNGEN_DEVICE void release(u32 barrier) const {
    if (lane == 0) mbarrier_arrive(barrier);
  }

  ATTNGEN_DEVICE void run() const {
    const int row = warp % 4 * 16 + lane / 4;
    float scores[kTileN / 2];
    float output[kColumns / 2];
    u32 weights[kTileN / 4];
    RowState state = {{-kInfinity, -kInfinity}, {0.f, 0.f}};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) output[i] = 0.f;
    load_queries();
    const MaskList masks = mask_list(p);
    const Context ctx = job.context(job.kv_head * p.group_size);
    // The thread's two rows, divided out while nothing has come yet.
    const int queries[2] = {forget(query(row)), forget(query(row + 8))};
    const int heads[2] = {forget(head(row)), forget(head(row + 8))};
    // Rows of the warp's 16 that queries have. A thread's second row is of no query where a group has
    // 8 heads and each one query; no row's softmax waits for another's.
    const int rows = job.q_len * p.group_size - job.first_row - warp % 4 * 16;
    const auto keep_range = [&](int half) { return masks.row_range(ctx, queries[half]); };
    RingPosition<kStages> ring;
    const u32 stages = used_stages();
#pragma unroll 1
    for (int block = job.begin; block < job.end; ++block) {
      mbarrier_wait(smem + kKFull + ring.stage * 8, ring.parity);
      gemm_shared_shared<QkMma, kQkSteps, kRowBoxBytes, kKBoxBytes, false, kKGroupBytes>(scores, smem + kSmemQ, smem + kSmemK + ring.stage * kQkBoxes * kKeyBoxBytes);
      wgmma_wait<0>();
      settle(scores);
      release(smem + kKEmpty + ring.stage * 8);
      if (block < job.blocks.full_begin || block >= job.blocks.full_end) mask(scores, block, keep_range);
      BlockSoftmax<kTileN, false> softmax = {p.scale_log2, 0.f};
      float rescale[2];
      softmax.find_maxima(scores);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * 8 < rows) softmax.raise(state, half, true, rescale);
      }
      softmax.settle_raised(scores, state);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half * 8 >= rows) break;
        softmax.weigh(scores, state, half, rescale);
#pragma unroll
        for (int k = 0; k < kColumns / 4; ++k) output[fragment_index(half, k)] *= rescale[half];
      }
      pack_weights<Element, kTileN>(weights, scores);
      const u32 values = smem + kSmemV + ring.stage * kVBoxes * kKeyBoxBytes;
      mbarrier_wait(smem + kVFull + ring.stage * 8, ring.parity);
      if ((block + 1) * kTileN > job.kv_len) clear_tail(values, job.kv_len - block * kTileN);
      gemm_accumulate<PvMma, kTileN / 16, kVBoxBytes, kVGroupBytes>(output, weights, values + first_column() / 64 * kVBoxBytes);
      wgmma_wait<0>();
      settle(output);
      release(smem + kVEmpty + ring.stage * 8);
      ring.advance(stages);
    }
    finish(output, state, queries, heads);
    if (job.first_row == 0 && job.split == 0) {  // it sees to the rows behind the sequence that are no one's
      const QSequence queries = q_sequence(p);
      clear_rows(queries.gap(job.batch, p.sequences));
      if (job.batch == 0) clear_rows(queries.gap(-1, p.sequences));
    }
  }

  // Place of a row of the tensor among all rows, in the order of the LSE.
  ATTNGEN_DEVICE long long place(int row, int h) const {
    return q_sequence(p).place(job.batch, row, h, p.heads_q);
  }

  // Rows to memory: the output itself, or normalised float32 parts of it that are combined later.
  ATTNGEN_DEVICE void finish(const float (&output)[kColumns / 2], const RowState& state, const int (&queries)[2], const int (&heads)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = queries[half];
      const int h = heads[half];
      const float largest = state.row_max[half] * (p.scale_log2 * kLn2);
      const float sum = quad_sum(state.row_sum[half]);
      if (i >= job.q_len) continue;
      const bool tells = (lane & 3) == 0 && warp < 4;  // one thread for all that have the row
      const long long at = place(job.first_token + i, h);
      if (p.splits > 1) {  // empty splits store zeros, which are read and weigh nothing
        const long long slot = job.split * p.total_rows + at;
        const bool seen = sum != 0.f;
        if (tells) static_cast<float2*>(p.lse_parts)[slot] = make_float2(seen ? largest : -kInfinity, log2_approx(sum));
        store_part(output, half, slot, seen ? 1.f / sum : 0.f);
      } else {
        const Context ctx = job.context(h);
        const SoftmaxRow result = VanillaSoftmax{}.finalize(ctx, largest, sum);
        if (tells) static_cast<float*>(p.lse)[at] = result.lse;
        store_row(output, half, job.first_token + i, h, result.normalizer);
      }
    }
  }
  ATTNGEN_DEVICE void store_part(const float (&output)[kColumns / 2], int half, long long slot, float factor) const {
    float* target = static_cast<float*>(p.o_parts) + slot * kHeadDimV + first_column() + (lane & 3) * 2;
#pragma unroll
    for (int k = 0; k < kColumns / 4; k += 2) {
      const int index = fragment_index(half, k);
      *reinterpret_cast<float2*>(target + fragment_column(index)) = make_float2(output[index] * factor, output[index + 1] * factor);
    }
  }
  ATTNGEN_DEVICE char* row_of_output(int row, int h) const {
    return static_cast<char*>(p.o) + 2 * (job.batch * p.o_stride_batch + row * p.o_stride_row + h * p.o_stride_head);
  }
  ATTNGEN_DEVICE void store_row(const float (&output)[kColumns / 2], int half, int row, int h, float factor) const {
    char* target = row_of_output(row, h) + 2 * first_column() + (lane & 3) * 4;
#pragma unroll
    for (int k = 0; k < kColumns / 4; k += 2) {
      const int index = fragment_index(half, k);
      *reinterpret_cast<u32*>(target + 2 * fragment_column(index)) = Element::pack(output[index] * factor, output[index + 1] * factor);
    }
  }
  // Rows of the tensor that belong to no sequence: zeros, and for the kernel that combines a mark
  // that no row of a sequence has.
  ATTNGEN_DEVICE void clear_rows(Range rows) const {
    for (int i = rows.lo * p.group_size + warp; i < rows.hi * p.group_size; i += kConsumerThreads / 32) {
      const int h = job.kv_head * p.group_size + i % p.group_size;
      const long long at = place(i / p.group_size, h);
      uint4* target = reinterpret_cast<uint4*>(row_of_output(i / p.group_size, h));
      for (int k = lane; k < kHeadDimV / 8; k += 32) target[k] = make_uint4(0, 0, 0, 0);
      if (lane > 0) continue;
      static_cast<float*>(p.lse)[at] = -kInfinity;
      if (p.splits > 1) static_cast<float2*>(p.lse_parts)[at] = make_float2(kInfinity, 0.f);
    }
  }
};

}  // namespace attngen

// Grid: key/value heads of row tiles of sequences, and splits.
extern "C" __global__ void __launch_bounds__(160, 2)
sm90_decode__causal_packed_used_d128_bf16_paged__367fdb(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = shared_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kKFull + i * 8, 1);
      mbarrier_init(smem + kKEmpty + i * 8, 4 * kConsumers);
      mbarrier_init(smem + kVFull + i * 8, 1);
      mbarrier_init(smem + kVEmpty + i * 8, 4 * kConsumers);
    }
    mbarrier_init_fence();
  }
  if (warp == 0) {
    __syncwarp();
    named_barrier_arrive(kReadyBarrier, 64);
  }
  allow_dependents();  // the kernel that combines waits for this one's end, but is there already
  const Job job = find_job(p);
  if (warp == kConsumerThreads / 32) {
    Loader{p, job, smem, lane}.run();
  } else {
    Consumer{p, job, smem, warp, lane}.run();
  }
}
