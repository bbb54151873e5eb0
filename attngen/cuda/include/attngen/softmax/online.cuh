// Online softmax over one block of scores held as an accumulator fragment.
//
// Scores x are in units where exp2(x * scale_log2) is the weight; `row_max` is kept in the units
// of x, `row_sum` is this thread's share of the row's sum until `quad_sum` joins the four shares.
// Two subjects of BlockSoftmax have files of their own, which its body includes.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

// A weight of less than 2^-kFaintLog2 of another of its row counts as none: as many as there may be
// leave no trace in a float32 sum.
constexpr float kFaintLog2 = 64.f;
// Largest weight relative to a maximum that is not the row's: float16 holds it.
constexpr float kLargestWeight = 0x1p14f;

// Up to this magnitude of a row's maximum in log2 units, a multiply-add gives weights that are
// off by 2^-14. Of larger ones the difference of score and maximum comes first, which is exact.
constexpr float kFineLog2 = 1024.f;

// Sum of a part of a thread's weights, up to which e4m3 holds each of them.
constexpr float kLargestTrusted = 448.f;

// room: log2 of how far a block may outgrow a row's maximum before this is raised; -inf where one
// of the warp's rows is large, so that every block counts as outgrowing it, and others need no
// test.
struct RowState {
  float row_max[2];
  float row_sum[2];
  float room;
};
// Rows whose maxima stay until a block has scores above a ceiling; their offset stays as well.
// Scores of 8 bits are no more exact than offsets: rounded up, these leave no weight above 1.
struct HeldRows : RowState {
  float ceiling[2];
  float offset[2];
};

// Rows whose offset stays until weights become too large; -inf where no key was seen.
struct TrustedRows {
  float row_sum[2];
  float offset[2];
};

// The softmax of one block of kN columns, in steps that a kernel orders as its plan says.
// kPairSums: weights join the sum two at a time, else in two sums. kLines: the scores of each row
// lack a term that is the same for the thread's whole part of it. kRoomApart: large maxima set a
// row's room on their own way, not by a choice that others make, too; by that it goes how many
// exponentials the compiler leaves ahead of a wait for a product.
template <int kN, bool kPairSums, bool kLines = false, bool kRoomApart = false>
struct BlockSoftmax {
  float scale_log2;
  float shift;    // log2 of what multiplies every weight
  float line[2];  // the missing terms
  float block_max[2];
  float offset[2];

  ATTNGEN_DEVICE void find_maxima(const float (&scores)[kN / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      block_max[half] = own_maximum(scores, half);
      if constexpr (kLines) block_max[half] += line[half];
    }
    agree();
  }
  // Bounds of the thread's part of each row: its maximum, or 0 where that is negative. Floats that
  // are not negative are ordered as integers, of which an instruction compares three.
  ATTNGEN_DEVICE void bound_maxima(const float (&scores)[kN / 2]) {
    const auto bits = [&](int i) { return __float_as_int(scores[i]); };
    int best[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      best[c] = max(max(bits(c), bits(kN / 2 - 4 + c)), 0);
#pragma unroll
      for (int i = 4; i < kN / 2 - 4; i += 8) {
        best[c] = max(max(best[c], bits(i + c)), bits(i + 4 + c));
      }
    }
    block_max[0] = __int_as_float(max(best[0], best[1]));
    block_max[1] = __int_as_float(max(best[2], best[3]));
    if constexpr (kLines) {
      block_max[0] += line[0];
      block_max[1] += line[1];
    }
  }

  // Whether a row's bound is above `met` and may be more than its maximum.
  ATTNGEN_DEVICE bool only_bounds(int half, float met) const {
    const float least = kLines ? line[half] : 0.f;
    return block_max[half] <= least && met < least;
  }

  // Whether some row of the warp outgrows its maximum by more than there is room for.
  ATTNGEN_DEVICE bool outgrow(const RowState& state) const {
    return __any_sync(~0u, (block_max[0] - state.row_max[0]) * scale_log2 > state.room ||
                               (block_max[1] - state.row_max[1]) * scale_log2 > state.room);
  }

  // Whether all of the thread's weights would be faint beside one that their row has already.
  ATTNGEN_DEVICE bool faint(const RowState& state) const {
    return (block_max[0] - state.row_max[0]) * scale_log2 < -kFaintLog2 &&
           (block_max[1] - state.row_max[1]) * scale_log2 < -kFaintLog2;
  }

  // The row's new maximum, if it may grow, and the factor for what was accumulated before.
  ATTNGEN_DEVICE void raise(RowState& state, int half, bool grew, float (&rescale)[2]) {
    const float old_max = state.row_max[half];
    if (grew) state.row_max[half] = fmaxf(old_max, block_max[half]);
    find_offset(state, half);
    // The difference first: an unchanged maximum must give 1 exactly, or the sum drifts.
    rescale[half] = exp2_approx((old_max - finite(state.row_max[half])) * scale_log2);
  }

  // Both new maxima and factors, from bounds: rows keep their maxima, and no maximum is looked for,
  // where the bounds of the warp's rows outgrow these by no more than 2^slack, nor do rows change
  // where maxima do not. Returns whether they do.
  ATTNGEN_DEVICE bool raise_rarely(float (&scores)[kN / 2], RowState& state, float slack,
                                   float (&rescale)[2]) {
    bool grew = outgrow(state);
    if (grew) {
      find_raised(scores);
      grew = outgrow(state);
    }
    rescale[0] = rescale[1] = 1.f;
    find_offset(state, 0);
    find_offset(state, 1);
    if (grew) {
      raise(state, 0, true, rescale);
      raise(state, 1, true, rescale);
      settle_raised(scores, state, slack);
    }
    return grew;
  }

  // Raises rows that are held: sums change with the maxima, and `rescale` is set only then.
  ATTNGEN_DEVICE bool raise_rarely(float (&scores)[kN / 2], HeldRows& state, float slack,
                                   float (&rescale)[2]) {
    bool grew = outgrow(state);
    if (grew) {
      find_raised(scores);
      grew = outgrow(state);
    }
    if (grew) {
      raise(state, 0, true, rescale);
      raise(state, 1, true, rescale);
      state.row_sum[0] *= rescale[0];
      state.row_sum[1] *= rescale[1];
      hold(state, slack);
    }
    offset[0] = state.offset[0];
    offset[1] = state.offset[1];
    return grew;
  }

  // Rows whose maxima may have risen: where one is large, scores become what they lack to it.
  ATTNGEN_DEVICE void settle_raised(float (&scores)[kN / 2], RowState& state, float slack = 0.f) {
    const float most = fmaxf(fabsf(finite(state.row_max[0])), fabsf(finite(state.row_max[1])));
    const bool large = __any_sync(~0u, !(most * scale_log2 <= kFineLog2));
    state.room = large && !kRoomApart ? -kInfinity : slack;
    if (large) {
      if constexpr (kRoomApart) state.room = -kInfinity;
      subtract_maxima(scores, state);
    }
  }

  // The row's maximum stays, which is finite.
  ATTNGEN_DEVICE void keep(const RowState& state, int half) {
    offset[half] = __fmaf_ru(state.row_max[half], scale_log2, -shift);
  }

#include "attngen/softmax/online/weights.cuh"

  ATTNGEN_DEVICE bool outgrow(const HeldRows& state) const {
    return __any_sync(~0u, block_max[0] > state.ceiling[0] || block_max[1] > state.ceiling[1]);
  }
  ATTNGEN_DEVICE void hold(HeldRows& state, float slack) const {
    // Where every score is 0 no number is too large; a row that has seen no key stays at -inf.
    const float room = fminf(slack * reciprocal_approx(scale_log2), 1e30f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.ceiling[half] = state.row_max[half] + room;
      state.offset[half] = offset[half];
    }
  }

#include "attngen/softmax/online/trusted_rows.cuh"

  // The first block of a row: maxima, weights and sums from nothing.
  ATTNGEN_DEVICE void begin(float (&scores)[kN / 2], RowState& state, float slack = 0.f) {
    start(scores, state);
    settle_raised(scores, state, slack);
    weigh_first(scores, state);
  }
  ATTNGEN_DEVICE void begin(float (&scores)[kN / 2], HeldRows& state, float slack) {
    start(scores, state);
    weigh_first(scores, state);
    hold(state, slack);
  }

 private:
  ATTNGEN_DEVICE static bool are_fine(float first, float second) {
    return fmaxf(fabsf(first), fabsf(second)) <= kFineLog2;
  }
  template <class Rows>
  ATTNGEN_DEVICE void start(const float (&scores)[kN / 2], Rows& state) {
    find_maxima(scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.row_max[half] = block_max[half];
      find_offset(state, half);
    }
  }
  ATTNGEN_DEVICE void weigh_first(float (&scores)[kN / 2], RowState& state) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.row_sum[half] = exponentiate<0, kN / 4>(scores, half, scale());
    }
  }
  ATTNGEN_DEVICE void subtract_maxima(float (&scores)[kN / 2], const RowState& state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = from_line(half, finite(state.row_max[half]));
      offset[half] = -shift;
#pragma unroll
      for (int k = 0; k < kN / 4; ++k) scores[fragment_index(half, k)] -= most;
    }
  }
  ATTNGEN_DEVICE float from_maximum(int half) const {
    return __fmaf_ru(block_max[half], scale_log2, -shift);
  }
  ATTNGEN_DEVICE bool outgrow(const TrustedRows& state, float slack) const {
    return __any_sync(~0u, from_maximum(0) - state.offset[0] > slack ||
                               from_maximum(1) - state.offset[1] > slack);
  }
  // Offsets, and what was summed by them, raised to the block's maxima.
  ATTNGEN_DEVICE void raise(TrustedRows& state, float (&rescale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float old = state.offset[half];
      state.offset[half] = fmaxf(old, from_maximum(half));
      rescale[half] = exp2_approx(old - finite(state.offset[half]));
      state.row_sum[half] *= rescale[half];
      offset[half] = finite(state.offset[half]);
    }
  }
  ATTNGEN_DEVICE static float own_maximum(const float (&scores)[kN / 2], int half) {
    float even = scores[fragment_index(half, 0)];
    float odd = scores[fragment_index(half, 1)];
#pragma unroll
    for (int k = 2; k < kN / 4; k += 2) {
      even = fmaxf(even, scores[fragment_index(half, k)]);
      odd = fmaxf(odd, scores[fragment_index(half, k + 1)]);
    }
    return fmaxf(even, odd);
  }
  // Maxima from bounds: those above 0 are the thread's.
  ATTNGEN_DEVICE void find_raised(const float (&scores)[kN / 2]) {
    if (kLines || __any_sync(~0u, fminf(block_max[0], block_max[1]) <= 0.f)) {
      find_maxima(scores);
    } else {
      agree();
    }
  }
  // The four threads of a row.
  ATTNGEN_DEVICE void agree() {
    block_max[0] = quad_max(block_max[0]);
    block_max[1] = quad_max(block_max[1]);
  }
  ATTNGEN_DEVICE void find_offset(const RowState& state, int half) {
    offset[half] = __fmaf_ru(from_line(half, finite(state.row_max[half])), scale_log2, -shift);
  }
  // The first of the thread's elements in a part: whole groups of 16 columns, of which it packs two
  // registers.
  ATTNGEN_HD static constexpr int part_begin(int parts, int part) {
    return kN / 16 * part / parts * 8;
  }

  template <class Element, int kParts, int kPart>
  ATTNGEN_DEVICE void weigh_part(float (&scores)[kN / 2], u32 (&packed)[kN / 8],
                                 float (&sum)[2]) const {
    if constexpr (kPart < kParts) {
#pragma unroll
      for (int i = part_begin(kParts, kPart); i < part_begin(kParts, kPart + 1); ++i) {
        scores[i] = exp2_approx(scores[i]);
      }
      scale_part<kParts, kPart + 1>(scores);
    }
    if constexpr (kPart > 0) sum_and_pack_part<Element, kParts, kPart - 1>(scores, packed, sum);
    if constexpr (kPart < kParts) {
      schedule_fence();
      weigh_part<Element, kParts, kPart + 1>(scores, packed, sum);
    }
  }

  template <class Element, int kParts, int kPart>
  ATTNGEN_DEVICE static void sum_and_pack_part(const float (&weights)[kN / 2],
                                               u32 (&packed)[kN / 8], float (&sum)[2]) {
#pragma unroll
    for (int i = part_begin(kParts, kPart); i < part_begin(kParts, kPart + 1); i += 8) {
      const float* x = weights + i;
      sum[0] += (x[0] + x[1]) + (x[4] + x[5]);
      sum[1] += (x[2] + x[3]) + (x[6] + x[7]);
      packed[i / 4] = Element::pack(x[0], x[1], x[4], x[5]);
      packed[i / 4 + 1] = Element::pack(x[2], x[3], x[6], x[7]);
    }
  }

  // A row that has seen no key keeps -inf; 0 stands in so that exp2 gives 0, not NaN.
  ATTNGEN_DEVICE static float finite(float max) { return max == -kInfinity ? 0.f : max; }
  ATTNGEN_DEVICE float from_line(int half, float x) const {
    if constexpr (kLines) return x - line[half];
    return x;
  }

  ATTNGEN_DEVICE auto scale() const {
    return [this](float) { return scale_log2; };
  }

  template <int kFrom, int kTo, class Factor>
  ATTNGEN_DEVICE float exponentiate(float (&scores)[kN / 2], int half, Factor factor) const {
    float even = 0.f;
    float odd = 0.f;
#pragma unroll
    for (int k = kFrom; k < kTo; k += 2) {
      float& a = scores[fragment_index(half, k)];
      float& b = scores[fragment_index(half, k + 1)];
      a = exp2_approx(a * factor(a) - offset[half]);
      b = exp2_approx(b * factor(b) - offset[half]);
      if constexpr (kPairSums) {
        even += a + b;
      } else {
        even += a;
        odd += b;
      }
    }
    return even + odd;
  }
};

// Weights as 16-bit pairs in the order in which wgmma takes its A operand from registers.
template <class Element, int kN>
ATTNGEN_DEVICE void pack_weights(u32 (&packed)[kN / 4], const float (&weights)[kN / 2]) {
  pack_pairs<Element, kN / 2>(packed, weights);
}
// Weights as four bytes a register, keys in the order of mma/transpose.cuh.
template <class Element, int kN>
ATTNGEN_DEVICE void pack_weights(u32 (&packed)[kN / 8], const float (&weights)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const float* pair = weights + (i / 2) * 8 + (i % 2) * 2;
    packed[i] = Element::pack(pair[0], pair[1], pair[4], pair[5]);
  }
}

}  // namespace attngen
