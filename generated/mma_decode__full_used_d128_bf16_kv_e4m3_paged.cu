// mma_decode__full_used_d128_bf16_kv_e4m3_paged__db00d7
// Rendered by attngen from kernels/mma_sync/decode/decode.cu.j2; do not edit.
#include "attngen/context.cuh"
#include "attngen/copy/warp_rows.cuh"
#include "attngen/mma/atoms.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
#include "attngen/scale.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/splits.cuh"
#include "attngen/softmax/online.cuh"
#include "attngen/softmax/row.cuh"

namespace attngen {

// ---- the problem
constexpr int kHeadDimQk = 128;
constexpr int kHeadDimV = 128;
using Element = Bf16;
using KvElement = E4m3;
constexpr int kElementBytes = 1;  // of keys and values

// ---- the plan
constexpr int kRowTiles = 1;  // of 16 rows, which warps divide
constexpr int kRows = 16 * kRowTiles;
constexpr int kWarps = 4;
constexpr int kRowWarps = kWarps / kRowTiles;  // of the same rows
constexpr int kConsumerThreads = kWarps * 32;
constexpr int kKeys = 16;  // of a block, a warp's
constexpr int kTileN = kRowWarps * kKeys;
constexpr int kStages = 4;
constexpr int kQkSteps = ceil_div(kHeadDimQk, 16);
constexpr int kQkBoxes = ceil_div(kHeadDimQk, 64);
constexpr int kKept = kQkSteps > 8 ? 1 : kQkSteps;  // steps whose queries stay in registers
constexpr int kVSteps = ceil_div(kHeadDimV, 16);
constexpr int kOutputTiles = ceil_div(kHeadDimV, 8);
constexpr int kColumns = ceil_div(kOutputTiles, kRowWarps) * 8;  // of the output, those that a warp stores
constexpr u32 kRowBoxBytes = kRows * 128;
constexpr u32 kTileBoxBytes = 16 * 128;
constexpr u32 kKeyBoxBytes = kKeys * 128;
constexpr u32 kKStageBytes = ceil_div(kElementBytes * kHeadDimQk, 128) * kKeyBoxBytes;
constexpr u32 kVStageBytes = ceil_div(kElementBytes * kHeadDimV, 128) * kKeyBoxBytes;
constexpr u32 kSmemQ = 0;
constexpr u32 kSmemK = 4096;
constexpr u32 kSmemV = 36864;
constexpr u32 kSmemSums = 69632;

// ---- the fragments
struct VanillaSoftmax {
  // Factor that normalises the row's output, and its log-sum-exp (natural log), from the row's
  // largest scaled score and the sum of its weights relative to that one's.
  ATTNGEN_HD SoftmaxRow finalize(const Context&, float largest, float sum) const {
    if (sum == 0.f) return {0.f, -kInfinity};
    return {1.f / sum, largest + log2_of(sum) * kLn2};
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
struct RangeIteration {
  template <int kBlock, class MaskList>
  ATTNGEN_HD static BlockRange blocks(const MaskList& masks, const Context& ctx, int first_row,
                                      int last_row) {
    return kv_block_range<kBlock>(masks, ctx, first_row, last_row);
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

using QSequence = UsedSequence;
using KvSequence = UsedSequence;
using KvIteration = RangeIteration;
using Softmax = VanillaSoftmax;

struct Params {
  void* q;
  void* k;
  void* v;
  void* o;
  void* lse;
  void* o_parts;
  void* lse_parts;
  void* descale_k;
  void* descale_v;
  long long q_stride_row;
  long long q_stride_head;
  long long q_stride_batch;
  long long k_stride_row;
  long long k_stride_head;
  long long k_stride_batch;
  long long v_stride_row;
  long long v_stride_head;
  long long v_stride_batch;
  long long o_stride_row;
  long long o_stride_head;
  long long o_stride_batch;
  long long total_rows;
  int descale_k_stride_batch;
  int descale_k_stride_head;
  int descale_v_stride_batch;
  int descale_v_stride_head;
  int k_page_count;
  int v_page_count;
  int row_tiles;
  int heads_q;
  int heads_kv;
  int group_size;
  int splits;
  int bottom_right;
  int sequences;
  float scale_log2;
  int q_len;
  void* q_lengths;
  int q_least;
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
static_assert(sizeof(Params) == 320, "packed by the host");

ATTNGEN_DEVICE MaskList mask_list(const Params& p) {
  return {};
}
ATTNGEN_DEVICE QSequence q_sequence(const Params& p) { return UsedSequence{p.q_len, p.q_lengths, p.q_least}; }
ATTNGEN_DEVICE KvSequence kv_sequence(const Params& p) { return UsedSequence{p.kv_len, p.kv_lengths, p.kv_least}; }

// ---- rows that warps copy
ATTNGEN_DEVICE auto k_rows(const Params& p, int batch, int head, int rows) {
  const PageFetch fetch = PageFetch{p.k_page_table, p.k_page_table_stride, p.k_page_size, p.k_page_reciprocal, p.k_page_shift};
  return paged_rows<1>(p.k, fetch, batch, head, p.k_stride_batch, p.k_stride_head,
                   p.k_stride_row, p.k_page_count, rows);
}
ATTNGEN_DEVICE auto v_rows(const Params& p, int batch, int head, int rows) {
  const PageFetch fetch = PageFetch{p.v_page_table, p.v_page_table_stride, p.v_page_size, p.v_page_reciprocal, p.v_page_shift};
  return paged_rows<1>(p.v, fetch, batch, head, p.v_stride_batch, p.v_stride_head,
                   p.v_stride_row, p.v_page_count, rows);
}

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
  job.batch = p.row_tiles == 1 ? tile : tile / p.row_tiles;
  job.first_row = (tile - job.batch * p.row_tiles) * kRows;
  job.first_token = queries.first_token(job.batch);
  job.kv_head = blockIdx.x % p.heads_kv;
  job.split = blockIdx.y;
  job.q_len = queries.length(job.batch);
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

// ---- a warp: 16 rows, and keys of its own
struct Warp {
  const Params& p;
  const Job& job;
  u32 smem;
  int warp;
  int lane;
  // Factors of a product of Q and stored K, for log2 units, and of the output.
  float scale_log2;
  float output_scale;

  // The query and the head of row `row` of the tile.
  ATTNGEN_DEVICE int query(int row) const { return (job.first_row + row) / p.group_size; }
  ATTNGEN_DEVICE int head(int row) const { return job.kv_head * p.group_size + (job.first_row + row) % p.group_size; }
  ATTNGEN_DEVICE int first_column() const { return warp * kColumns; }
  ATTNGEN_DEVICE u32 key_tile(u32 stage) const { return smem + kSmemK + (warp * kStages + stage) * kKStageBytes; }
  ATTNGEN_DEVICE u32 value_tile(u32 stage) const { return smem + kSmemV + (warp * kStages + stage) * kVStageBytes; }
  // The first of the warp's keys of a block.
  ATTNGEN_DEVICE int first_key(int block) const { return block * kTileN + warp * kKeys; }

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
  }
  // Queries of 16 columns: of each row a lane's four lie behind each other.
  ATTNGEN_DEVICE void load_step(u32 (&a)[4], int step) const {
    const int column = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      u32 pairs[2];
      load_shared_x2(pairs, smem + kSmemQ + step / 4 * kRowBoxBytes + row * 128 + (((step % 4 * 2 + column / 2) ^ row) & 7) * 16 + column % 2 * 8);
      a[half] = pairs[0];
      a[half + 2] = pairs[1];
    }
  }
  ATTNGEN_DEVICE void multiply_keys(float (&scores)[kKeys / 2], const u32 (&queries)[kKept][4], u32 stage) const {
    const u32 place = key_tile(stage) + (lane & 15) * 128 + (((lane >> 4) ^ lane) & 7) * 16;
#pragma unroll
    for (float& x : scores) x = 0.f;
    u32 bytes[kKeys / 16][4];  // of two steps, of which a lane needs two words each
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      u32 a[4];
      if (kKept < kQkSteps) {
        load_step(a, step);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = queries[step % kKept][i];
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        if (step % 2 == 0) load_matrices(bytes[n], (place ^ (step / 2 % 4 * 32)) + step / 8 * kKeyBoxBytes + n * (16 * 128));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 b[2];
          KvElement::widen(b, bytes[n][step % 2 * 2 + half]);
          multiply_add<Element>(scores + n * 8 + half * 4, a, Element::from_widened(b[0]), Element::from_widened(b[1]));
        }
      }
    }
  }
  // Of each 16 columns the even ones and the odd ones.
  ATTNGEN_DEVICE void multiply_values(float (&output)[kVSteps * 8], const u32 (&a)[4], int k, u32 stage) const {
    const u32 place = value_tile(stage) + (lane & 15) * 128 + (((lane >> 4) ^ lane) & 7) * 16;
#pragma unroll
    for (int n = 0; n < ceil_div(kVSteps, 2); ++n) {
      u32 bytes[4];
      load_matrices_transposed(bytes, (place ^ (n % 4 * 32)) + n / 4 * kKeyBoxBytes + k * (16 * 128));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = n * 2 + i;
        if (step >= kVSteps) break;
        u32 low[2], high[2];  // of keys 0 to 7 and 8 to 15, a word for even columns and one for odd ones
        KvElement::widen(low, permute_bytes(bytes[i * 2], 0, 0x3120));
        KvElement::widen(high, permute_bytes(bytes[i * 2 + 1], 0, 0x3120));
        multiply_add<Fp16>(output + step * 8, a, low[0], high[0]);
        multiply_add<Fp16>(output + step * 8 + 4, a, low[1], high[1]);
      }
    }
  }
  // The warp's output, as fragments of 8 columns that lie behind each other, in the columns' order.
  ATTNGEN_DEVICE void leave_part(u32 part, const float (&output)[kVSteps * 8]) const {
    const int column = lane & 3;
#pragma unroll
    for (int step = 0; step < kVSteps; ++step) {
      const u32 tile = part + ((step * 2 + column / 2) * 32 + (lane & ~3) + column % 2 * 2) * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // of row i / 4, column i % 4 of the lane's
        store_shared(tile + i % 4 / 2 * 16 + i / 4 * 8 + i % 2 * 4, output[step * 8 + i % 2 * 4 + i / 4 * 2 + i % 4 / 2]);
      }
    }
  }

  ATTNGEN_DEVICE void run() const {
    const auto keys = k_rows(p, job.batch, job.kv_head, job.kv_len);
    const auto values = v_rows(p, job.batch, job.kv_head, job.kv_len);
    using KShare = WarpShare<kElementBytes * kHeadDimQk, kKeys>;
    using VShare = WarpShare<kElementBytes * kHeadDimV, kKeys>;
    // Pages of the rows that are copied next, asked for a block before.
    int k_pages[KShare::kSteps], v_pages[VShare::kSteps];
    const auto find = [&](int block) {
      KShare::find(k_pages, keys, first_key(block), lane);
      VShare::find(v_pages, values, first_key(block), lane);
    };
    const auto copy = [&](int block, u32 stage) {
      if (block < job.end) {
        KShare::copy(key_tile(stage), k_pages, keys, first_key(block), lane);
        VShare::copy(value_tile(stage), v_pages, values, first_key(block), lane);
        if (block + 1 < job.end) find(block + 1);
      }
      cute::cp_async_fence();
    };
    if (job.begin < job.end) find(job.begin);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy(job.begin + i, i);
    load_queries();
    __syncthreads();
    u32 kept[kKept][4];
#pragma unroll
    for (int step = 0; step < kKept; ++step) load_step(kept[step], step);

    const int row = lane / 4;
    const int queries[2] = {query(row), query(row + 8)};
    const int heads[2] = {head(row), head(row + 8)};
    const MaskList masks = mask_list(p);
    const Context ctx = job.context(job.kv_head * p.group_size);
    const Range seen[2] = {masks.row_range(ctx, queries[0]), masks.row_range(ctx, queries[1])};
    float output[kVSteps * 8];
#pragma unroll
    for (float& x : output) x = 0.f;
    RowState state = {{-kInfinity, -kInfinity}, {0.f, 0.f}, 0.f};
    u32 stage = 0;
#pragma unroll 1
    for (int block = job.begin; block < job.end; ++block) {
      cute::cp_async_wait<kStages - 2>();
      __syncwarp();  // the block is there, and all lanes have read the one before
      copy(block + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
      weigh(output, state, kept, seen, block, stage);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    cute::cp_async_wait<0>();
    float own[kColumns / 2];
    join(own, output, state);
    finish(own, state, queries, heads);
    if (job.first_row == 0 && job.split == 0) {  // it sees to the rows behind the sequence that are no one's
      const QSequence sequence = q_sequence(p);
      clear_rows(sequence.gap(job.batch, p.sequences));
      if (job.batch == 0) clear_rows(sequence.gap(-1, p.sequences));
    }
  }

  // The warp's keys of a block, from scores to output.
  ATTNGEN_DEVICE void weigh(float (&output)[kVSteps * 8], RowState& state, const u32 (&kept)[kKept][4], const Range (&seen)[2], int block, u32 stage) const {
    float scores[kKeys / 2];
    multiply_keys(scores, kept, stage);
    const int column = first_key(block) + (lane & 3) * 2;
    if (block < job.blocks.full_begin || block >= job.blocks.full_end) {
#pragma unroll
      for (int half = 0; half < 2; ++half) hide_outside<kKeys>(scores, half, seen[half].lo - column, seen[half].hi - column);
    }
    BlockSoftmax<kKeys, false> soft = {scale_log2, 0.f};
    soft.find_maxima(scores);
    const bool grew = soft.outgrow(state);
    float rescale[2];
    soft.raise(state, 0, grew, rescale);
    soft.raise(state, 1, grew, rescale);
    if (grew) {
      soft.settle_raised(scores, state);
      state.row_sum[0] *= rescale[0];
      state.row_sum[1] *= rescale[1];
#pragma unroll
      for (int i = 0; i < kVSteps * 8; ++i) output[i] *= rescale[fragment_row(i)];
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = k * 8; i < k * 8 + 8; ++i) {
        scores[i] = exp2_approx(scores[i] * soft.scale_log2 - soft.offset[fragment_row(i)]);
        state.row_sum[fragment_row(i)] += scores[i];
      }
      u32 a[4];
      pack_pairs<Fp16, 8>(a, scores + k * 8);
      multiply_values(output, a, k, stage);
    }
  }

  // Joins what the warps have: the state of all of them, and of the output the warp's columns.
  ATTNGEN_DEVICE void join(float (&own)[kColumns / 2], const float (&output)[kVSteps * 8], RowState& state) const {
    __syncthreads();  // nobody reads keys or values any more, whose places the sums take
    const u32 parts = smem + kSmemK;
    leave_part(parts + warp * (kOutputTiles * 512), output);
    const float sums[2] = {quad_sum(state.row_sum[0]), quad_sum(state.row_sum[1])};
    const float mine[4] = {state.row_max[0], sums[0], state.row_max[1], sums[1]};
    if ((lane & 3) == 0) store_shared_x4(smem + kSmemSums + (warp * 8 + lane / 4) * 16, mine);
    __syncthreads();
    float others[kWarps][4];
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      load_shared_x4(others[w], smem + kSmemSums + (w * 8 + lane / 4) * 16);
      state.row_max[0] = fmaxf(state.row_max[0], others[w][0]);
      state.row_max[1] = fmaxf(state.row_max[1], others[w][2]);
    }
    float factors[kWarps][2];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = others[w][2 * half];
        factors[w][half] = most == -kInfinity ? 0.f : exp2_approx((most - state.row_max[half]) * scale_log2);
        total[half] += others[w][2 * half + 1] * factors[w][half];
      }
    }
    state.row_sum[0] = (lane & 3) == 0 ? total[0] : 0.f;  // of the four threads of a row
    state.row_sum[1] = (lane & 3) == 0 ? total[1] : 0.f;
#pragma unroll
    for (int t = 0; t < kColumns / 8; ++t) {
      float* sum = own + t * 4;
      sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
      const int tile = warp * (kColumns / 8) + t;
      if (tile >= kOutputTiles) continue;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        float part[4];
        load_shared_x4(part, parts + ((w * kOutputTiles + tile) * 32 + lane) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += part[i] * factors[w][i / 2];
      }
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
      const float largest = state.row_max[half] * (scale_log2 * kLn2);
      const float sum = quad_sum(state.row_sum[half]);
      if (i >= job.q_len) continue;
      const bool tells = (lane & 3) == 0 && warp == 0;  // one thread for all that have the row
      const long long at = place(job.first_token + i, h);
      if (p.splits > 1) {  // empty splits store zeros, which are read and weigh nothing
        const long long slot = job.split * p.total_rows + at;
        const bool seen = sum != 0.f;
        if (tells) static_cast<float2*>(p.lse_parts)[slot] = make_float2(seen ? largest : -kInfinity, log2_approx(sum));
        store_part(output, half, slot, seen ? output_scale / sum : 0.f);
      } else {
        const Context ctx = job.context(h);
        const SoftmaxRow result = VanillaSoftmax{}.finalize(ctx, largest, sum);
        if (tells) static_cast<float*>(p.lse)[at] = result.lse;
        store_row(output, half, job.first_token + i, h, result.normalizer * output_scale);
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
extern "C" __global__ void __launch_bounds__(128, 1)
mma_decode__full_used_d128_bf16_kv_e4m3_paged__db00d7(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Job job = find_job(p);
  const float k_scale = read_scale(p.descale_k, job.batch * p.descale_k_stride_batch + job.kv_head * p.descale_k_stride_head);
  const float v_scale = read_scale(p.descale_v, job.batch * p.descale_v_stride_batch + job.kv_head * p.descale_v_stride_head);
  Warp{p, job, shared_address(shared), static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), log2_scale(p.scale_log2 * k_scale), v_scale}.run();
}
