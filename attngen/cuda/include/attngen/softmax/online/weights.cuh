// Members of BlockSoftmax (softmax/online.cuh), in whose body this file stands: scores become
// weights, which are summed and packed.

// Replaces the scores by weights relative to the rows' maxima as they are, and sums them.
ATTNGEN_DEVICE void weigh_kept(float (&scores)[kN / 2], float (&sum)[2]) const {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = exponentiate<0, kN / 4>(scores, half, scale());
  }
}
// Raises the rows' maxima to the block's, and weighs the scores relative to these.
ATTNGEN_DEVICE void weigh_raised(float (&scores)[kN / 2], RowState& state, float (&sum)[2],
                                 float (&rescale)[2]) {
  find_maxima(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    raise(state, half, true, rescale);
    state.row_sum[half] *= rescale[half];
  }
  settle_raised(scores, state);
  weigh_kept(scores, sum);
}
// Whether a weight of the warp may be too large, since its thread's sums do not exclude it, or may
// be no number; or whether a maximum is too large.
ATTNGEN_DEVICE bool outgrown(const float (&sum)[2]) const {
  return __any_sync(~0u, !(sum[0] + sum[1] <= kLargestWeight) | !are_fine(offset[0], offset[1]));
}

// Replaces the row's scores, or the first kTo that the thread has of them, by weights relative to
// its maximum, and adds them to its sum.
template <int kTo = kN / 4>
ATTNGEN_DEVICE void weigh(float (&scores)[kN / 2], RowState& state, int half,
                          const float (&rescale)[2]) const {
  state.row_sum[half] =
      state.row_sum[half] * rescale[half] + exponentiate<0, kTo>(scores, half, scale());
}
// Weighs the row's scores from kFrom on.
template <int kFrom>
ATTNGEN_DEVICE void weigh_rest(float (&scores)[kN / 2], RowState& state, int half) const {
  state.row_sum[half] += exponentiate<kFrom, kN / 4>(scores, half, scale());
}
// Weighs those from kFrom to kTo, where `factor(x)` times x is the score in log2 units.
template <int kFrom, int kTo, class Factor>
ATTNGEN_DEVICE void weigh_by(Factor factor, float (&scores)[kN / 2], RowState& state,
                             int half) const {
  state.row_sum[half] += exponentiate<kFrom, kTo>(scores, half, factor);
}

// Weighs them, and returns their sum, which the row does not get.
template <int kFrom, int kTo, class Factor>
ATTNGEN_DEVICE float weights_by(Factor factor, float (&scores)[kN / 2], int half) const {
  return exponentiate<kFrom, kTo>(scores, half, factor);
}

// Replaces the scores by weights, packs these and adds them to the sums, a kParts-th at a time:
// the exponentials of each run under the sums of the one before. Left to itself, the compiler
// puts what takes a result 17 cycles behind its exponential, which needs 34.
template <class Element, int kParts>
ATTNGEN_DEVICE void weigh_in_parts(float (&scores)[kN / 2], u32 (&packed)[kN / 8],
                                   RowState& state) const {
  float sum[2] = {0.f, 0.f};
  weigh_part<Element, kParts, 0>(scores, packed, sum);
  state.row_sum[0] += sum[0];
  state.row_sum[1] += sum[1];
}
// First half of weighing in one part: exponentials. It touches no packed weights, so that the
// product before may still be reading its own.
ATTNGEN_DEVICE void exponentiate_all(float (&scores)[kN / 2]) const {
  scale_part<1>(scores);
  schedule_fence();
#pragma unroll
  for (float& x : scores) x = exp2_approx(x);
  schedule_fence();
}
// One of kPieces of these exponentials, of scores that are scaled, without fences.
template <int kPieces>
ATTNGEN_DEVICE void exponentiate_piece(float (&scores)[kN / 2], int piece) const {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    if (i * kPieces / (kN / 2) == piece) scores[i] = exp2_approx(scores[i]);
  }
}
template <class Element, class Rows>
ATTNGEN_DEVICE void sum_and_pack(const float (&weights)[kN / 2], u32 (&packed)[kN / 8],
                                 Rows& state) const {
  float sum[2] = {0.f, 0.f};
  sum_and_pack_part<Element, 1, 0>(weights, packed, sum);
  state.row_sum[0] += sum[0];
  state.row_sum[1] += sum[1];
}
// Scales a part of the scores, or all: first of all, before the product is awaited.
template <int kParts, int kPart = 0>
ATTNGEN_DEVICE void scale_part(float (&scores)[kN / 2]) const {
  if constexpr (kPart < kParts) {
#pragma unroll
    for (int i = part_begin(kParts, kPart); i < part_begin(kParts, kPart + 1); ++i) {
      scores[i] = scores[i] * scale_log2 - offset[fragment_row(i)];
    }
  }
}
