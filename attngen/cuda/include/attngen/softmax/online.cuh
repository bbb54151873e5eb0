// Online softmax over one block of scores held as an accumulator fragment.
//
// Scores x are in units where exp2(x * scale_log2) is the weight; `row_max` is kept in the units
// of x, `row_sum` is this thread's share of the row's sum until `quad_sum` joins the four shares.
#pragma once

#include "attngen/mma/fragment.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

struct RowState {
  float row_max[2];
  float row_sum[2];
};

// The softmax of one block of kN columns, in steps that a kernel orders as its plan says.
// kPairSums: weights join the sum two at a time, else in two sums. kLines: the scores of each row
// lack a term that is the same for the thread's whole part of it.
template <int kN, bool kPairSums, bool kLines = false>
struct BlockSoftmax {
  float scale_log2;
  float shift;    // log2 of what multiplies every weight
  float line[2];  // the missing terms
  float block_max[2];
  float offset[2];

  ATTNGEN_DEVICE void find_maxima(const float (&scores)[kN / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = scores[fragment_index(half, 0)];
      float odd = scores[fragment_index(half, 1)];
#pragma unroll
      for (int k = 2; k < kN / 4; k += 2) {
        even = fmaxf(even, scores[fragment_index(half, k)]);
        odd = fmaxf(odd, scores[fragment_index(half, k + 1)]);
      }
      float largest = fmaxf(even, odd);
      if constexpr (kLines) largest += line[half];
      block_max[half] = quad_max(largest);
    }
  }

  // Whether what was accumulated must be rescaled. With kLazyLog2 > 0 old maxima stay until some
  // row of the warp outgrows its own by 2^kLazyLog2.
  template <int kLazyLog2>
  ATTNGEN_DEVICE bool outgrow(const RowState& state) const {
    if constexpr (kLazyLog2 == 0) return true;
    const float limit = kLazyLog2;
    return __any_sync(~0u, (block_max[0] - state.row_max[0]) * scale_log2 > limit ||
                               (block_max[1] - state.row_max[1]) * scale_log2 > limit);
  }

  // The row's new maximum, if it may grow, and the factor for what was accumulated before.
  ATTNGEN_DEVICE void raise(RowState& state, int half, bool grew, float (&rescale)[2]) {
    const float old_max = state.row_max[half];
    if (grew) state.row_max[half] = fmaxf(old_max, block_max[half]);
    const float reference = finite(state.row_max[half]);
    offset[half] = from_line(half, reference) * scale_log2 - shift;
    // The difference first: an unchanged maximum must give 1 exactly, or the sum drifts.
    rescale[half] = exp2_approx((old_max - reference) * scale_log2);
  }

  // The row's new maximum, where the block's outgrows the old one by 2^kLazyLog2, and the factor
  // for what was accumulated before. Returns whether it did: rows need not wait for each other.
  template <int kLazyLog2>
  ATTNGEN_DEVICE bool raise_outgrown(RowState& state, int half, float (&rescale)[2]) {
    const bool outgrown = (block_max[half] - state.row_max[half]) * scale_log2 > kLazyLog2;
    raise(state, half, outgrown, rescale);
    return outgrown;
  }

  // Replaces the row's scores, or the first kTo that the thread has of them, by weights relative to
  // its maximum, and adds them to its sum.
  template <int kTo = kN / 4>
  ATTNGEN_DEVICE void weigh(float (&scores)[kN / 2], RowState& state, int half,
                            const float (&rescale)[2]) const {
    state.row_sum[half] =
        state.row_sum[half] * rescale[half] + exponentiate<0, kTo>(scores, half, scale());
  }
  // The same for those from kFrom on.
  template <int kFrom>
  ATTNGEN_DEVICE void weigh_rest(float (&scores)[kN / 2], RowState& state, int half) const {
    state.row_sum[half] += exponentiate<kFrom, kN / 4>(scores, half, scale());
  }
  // The same for all scores of the row, where `factor(x)` times x is the score in log2 units.
  template <class Factor>
  ATTNGEN_DEVICE void weigh_by(Factor factor, float (&scores)[kN / 2], RowState& state, int half,
                               const float (&rescale)[2]) const {
    state.row_sum[half] =
        state.row_sum[half] * rescale[half] + exponentiate<0, kN / 4>(scores, half, factor);
  }

  // The first block of a row: maxima, weights and sums from nothing.
  ATTNGEN_DEVICE void begin(float (&scores)[kN / 2], RowState& state) {
    find_maxima(scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.row_max[half] = block_max[half];
      offset[half] = from_line(half, finite(block_max[half])) * scale_log2 - shift;
      state.row_sum[half] = exponentiate<0, kN / 4>(scores, half, scale());
    }
  }

 private:
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
