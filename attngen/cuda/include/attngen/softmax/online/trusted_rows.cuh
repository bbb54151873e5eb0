// Members of BlockSoftmax (softmax/online.cuh), in whose body this file stands: rows whose offsets
// are trusted to stay, until weights outgrow them.

// The first block of trusted rows: maxima, offsets, weights and sums.
ATTNGEN_DEVICE void begin(float (&scores)[kN / 2], TrustedRows& state) {
  find_maxima(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.offset[half] = from_maximum(half);
    offset[half] = finite(state.offset[half]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.row_sum[half] = exponentiate<0, kN / 4>(scores, half, scale());
  }
}
// A block with bounds of its maxima: rows change if these outgrow theirs by 2^slack.
ATTNGEN_DEVICE bool raise_rarely(float (&scores)[kN / 2], TrustedRows& state, float slack,
                                 float (&rescale)[2]) {
  bool grew = outgrow(state, slack);
  if (grew) {
    find_raised(scores);
    grew = outgrow(state, slack);
  }
  offset[0] = finite(state.offset[0]);
  offset[1] = finite(state.offset[1]);
  if (grew) raise(state, rescale);
  return grew;
}
// A block whose scores are taken relative to the offsets as they are.
ATTNGEN_DEVICE void trust(const TrustedRows& state) {
  offset[0] = state.offset[0];
  offset[1] = state.offset[1];
}
// Sums of weights, and whether one of the warp may be too large, or is no number.
ATTNGEN_DEVICE static bool add_up(const float (&weights)[kN / 2], float (&sum)[2]) {
  float part[4];
#pragma unroll
  for (int i = 0; i < kN / 2; i += 8) {
    const float* x = weights + i;
    const float first = (x[0] + x[1]) + (x[4] + x[5]);
    const float second = (x[2] + x[3]) + (x[6] + x[7]);
    const int c = i < kN / 4 ? 0 : 2;
    const bool begins = i == 0 || i == kN / 4;
    part[c] = begins ? first : part[c] + first;
    part[c + 1] = begins ? second : part[c + 1] + second;
  }
  sum[0] = part[0] + part[2];
  sum[1] = part[1] + part[3];
  const auto bits = [&](int i) { return __float_as_int(part[i]); };
  const int largest = max(max(max(bits(0), bits(1)), bits(2)), bits(3));
  return __any_sync(~0u, largest > __float_as_int(kLargestTrusted));
}
// Whether weights of the warp are too large for float32.
ATTNGEN_DEVICE static bool overflowed(const float (&sum)[2]) {
  return __any_sync(~0u, fmaxf(sum[0], sum[1]) == kInfinity);
}
// Raises offsets by whole numbers until the largest weight is 2^shift or less.
ATTNGEN_DEVICE void lower(float (&weights)[kN / 2], TrustedRows& state, float (&sum)[2],
                          float (&rescale)[2]) const {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = quad_max(own_maximum(weights, half));
    const float by = fmaxf(ceilf(log2_approx(largest)) - shift, 0.f);
    rescale[half] = exp2_approx(-by);
    state.offset[half] += by;
    state.row_sum[half] *= rescale[half];
    sum[half] *= rescale[half];
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) weights[i] *= rescale[fragment_row(i)];
}

// Raises offsets to the block's maxima, and weighs the scores relative to these.
ATTNGEN_DEVICE void weigh_raised(float (&scores)[kN / 2], TrustedRows& state, float (&sum)[2],
                                 float (&rescale)[2]) {
  find_maxima(scores);
  raise(state, rescale);
  weigh_kept(scores, sum);
}
