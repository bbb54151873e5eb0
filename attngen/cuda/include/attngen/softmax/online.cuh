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

// Replaces scores by weights relative to the running maximum; `rescale` receives the factor for
// what was accumulated before. Returns whether any row of the warp needs that factor: with
// kLazyLog2 > 0 the old maximum stays until a row outgrows it by 2^kLazyLog2.
template <int kN, int kLazyLog2, bool kFirst>
ATTNGEN_DEVICE bool online_softmax(float (&scores)[kN / 2], RowState& state, float (&rescale)[2],
                                   float scale_log2) {
  float block_max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float even = scores[fragment_index(half, 0)];
    float odd = scores[fragment_index(half, 1)];
#pragma unroll
    for (int k = 2; k < kN / 4; k += 2) {
      even = fmaxf(even, scores[fragment_index(half, k)]);
      odd = fmaxf(odd, scores[fragment_index(half, k + 1)]);
    }
    block_max[half] = quad_max(fmaxf(even, odd));
  }
  bool grew = true;
  if constexpr (kLazyLog2 > 0 && !kFirst) {
    const float limit = kLazyLog2;
    grew = __any_sync(~0u, (block_max[0] - state.row_max[0]) * scale_log2 > limit ||
                               (block_max[1] - state.row_max[1]) * scale_log2 > limit);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float new_max = kFirst ? block_max[half] : fmaxf(state.row_max[half], block_max[half]);
    if constexpr (kLazyLog2 > 0 && !kFirst) new_max = grew ? new_max : state.row_max[half];
    // A row that has seen no key keeps -inf; 0 stands in so that exp2 gives 0, not NaN.
    const float reference = new_max == -kInfinity ? 0.f : new_max;
    const float offset = reference * scale_log2;
    // The difference first: an unchanged maximum must give 1 exactly, or the sum drifts.
    rescale[half] = kFirst ? 1.f : exp2_approx((state.row_max[half] - reference) * scale_log2);
    state.row_max[half] = new_max;
    float even = 0.f;
    float odd = 0.f;
#pragma unroll
    for (int k = 0; k < kN / 4; k += 2) {
      float& a = scores[fragment_index(half, k)];
      float& b = scores[fragment_index(half, k + 1)];
      a = exp2_approx(a * scale_log2 - offset);
      b = exp2_approx(b * scale_log2 - offset);
      even += a;
      odd += b;
    }
    const float block_sum = even + odd;
    state.row_sum[half] = kFirst ? block_sum : state.row_sum[half] * rescale[half] + block_sum;
  }
  return grew;
}

// Weights as 16-bit pairs in the order in which wgmma takes its A operand from registers.
template <class Element, int kN>
ATTNGEN_DEVICE void pack_weights(u32 (&packed)[kN / 4], const float (&weights)[kN / 2]) {
  pack_pairs<Element, kN / 2>(packed, weights);
}

}  // namespace attngen
