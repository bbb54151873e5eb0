// Scales of 8-bit tensors that have one a token and head: what a warp needs of a block's keys and
// values lies in shared memory, a float each.
#pragma once

#include "attngen/context.cuh"
#include "attngen/mma/fragment.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/softmax/online.cuh"

namespace attngen {

// A place that also says what the product of its query and key is multiplied by.
template <bool kPastHidden>
struct ScaledPlace : Place<kPastHidden> {
  float scale;
};

// The scores of rows whose maxima are large become what they lack to these, a row at a time: no
// other row of the warp changes a bit of one.
template <class Softmax, int kScores>
ATTNGEN_DEVICE void settle_rows(Softmax& softmax, float (&scores)[kScores], const RowState& state) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float largest = state.row_max[half];
    if (largest == -kInfinity || fabsf(largest) * softmax.scale_log2 <= kFineLog2) continue;
    softmax.offset[half] = -softmax.shift;
#pragma unroll
    for (int k = 0; k < kScores / 2; ++k) scores[fragment_index(half, k)] -= largest;
  }
}
// Raises rows that are held, each if its own scores outgrow its maximum by 2^slack. Returns whether
// any row of the warp did; `rescale` is 1 of others.
template <class Softmax, int kScores>
ATTNGEN_DEVICE bool raise_rows(Softmax& softmax, const float (&scores)[kScores], HeldRows& state,
                               float slack, float (&rescale)[2]) {
  bool grew = softmax.outgrow(state);
  if (grew) {
    softmax.find_maxima(scores);
    grew = softmax.outgrow(state);
  }
  rescale[0] = rescale[1] = 1.f;
  if (grew) {
    const HeldRows before = state;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool own = softmax.block_max[half] > before.ceiling[half];
      softmax.raise(state, half, own, rescale);
      state.row_sum[half] *= rescale[half];
    }
    softmax.hold(state, slack);
  }
  softmax.offset[0] = state.offset[0];
  softmax.offset[1] = state.offset[1];
  return grew;
}
// The first block of rows, a row at a time: maxima from nothing; then weights and sums.
template <class Softmax, int kScores, class State>
ATTNGEN_DEVICE void begin_maxima(Softmax& softmax, const float (&scores)[kScores], State& state,
                                 float (&rescale)[2]) {
  softmax.find_maxima(scores);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.row_max[half] = -kInfinity;
    state.row_sum[half] = 0.f;
    softmax.raise(state, half, true, rescale);
  }
}
template <class Softmax, int kScores>
ATTNGEN_DEVICE void begin_rows(Softmax softmax, float (&scores)[kScores], RowState& state) {
  float rescale[2];
  begin_maxima(softmax, scores, state, rescale);
  settle_rows(softmax, scores, state);
  softmax.weigh(scores, state, 0, rescale);
  softmax.weigh(scores, state, 1, rescale);
}
template <class Softmax, int kScores>
ATTNGEN_DEVICE void begin_rows(Softmax softmax, float (&scores)[kScores], HeldRows& state,
                               float slack) {
  float rescale[2];
  begin_maxima(softmax, scores, state, rescale);
  softmax.weigh(scores, state, 0, rescale);
  softmax.weigh(scores, state, 1, rescale);
  softmax.hold(state, slack);
}

// A value's scale within what logarithms and reciprocals leave finite; NaN is the least.
ATTNGEN_DEVICE float value_scale(float scale) { return fminf(fmaxf(scale, 0x1p-60f), 0x1p60f); }

// A row of scales: those of the tokens of a sequence and head.
struct ScaleRow {
  const float* first;
  int stride;

  // The scale of a token, 1 behind the sequence's last.
  ATTNGEN_DEVICE float at(int token, int end) const {
    return token < end ? __ldg(first + token * stride) : 1.f;
  }
};
ATTNGEN_DEVICE ScaleRow scale_row(const void* scales, int offset, int stride) {
  return {static_cast<const float*>(scales) + offset, stride};
}

// Scales of a block of kN keys.
template <int kN>
struct TokenScales {
  static constexpr u32 kBytes = kN * 12;
  u32 base;
  int lane;

  // A lane's share of them, on its way.
  struct Share {
    float keys[kN / 32];
    float values[kN / 32];
  };

  ATTNGEN_DEVICE void load(Share& share, const ScaleRow& keys, const ScaleRow& values, int first,
                           int end) const {
#pragma unroll
    for (int i = 0; i < kN / 32; ++i) {
      share.keys[i] = keys.at(first + i * 32 + lane, end);
      share.values[i] = values.at(first + i * 32 + lane, end);
    }
  }
  // Lays a block's down, once the warp is done with the block before. per_unit: by which log2 units
  // become those of scores.
  ATTNGEN_DEVICE void put(const Share& share, float per_unit) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kN / 32; ++i) {
      const u32 place = base + (i * 32 + lane) * 4;
      const float value = value_scale(share.values[i]);
      store_shared(place, share.keys[i]);
      store_shared(place + kN * 4, log2_approx(value) * per_unit);
      store_shared(place + kN * 8, reciprocal_approx(value));
    }
    __syncwarp();
  }

  // Of the thread's two columns of element `i` of its fragment, which is the first of four: scales
  // of keys, what scores gain by those of values, and these values' reciprocals.
  ATTNGEN_DEVICE float2 keys(int i) const { return load_shared_pair(place_of(i)); }
  ATTNGEN_DEVICE float2 gains(int i) const { return load_shared_pair(place_of(i) + kN * 4); }
  ATTNGEN_DEVICE float2 reciprocals(int i) const { return load_shared_pair(place_of(i) + kN * 8); }

  // Raises scores by the logarithms of the values' scales, so that weights are multiplied by these.
  ATTNGEN_DEVICE void raise(float (&scores)[kN / 2]) const {
#pragma unroll
    for (int i = 0; i < kN / 2; i += 4) {
      const float2 gain = gains(i);
#pragma unroll
      for (int k = 0; k < 4; ++k) scores[i + k] += k % 2 ? gain.y : gain.x;
    }
  }
  // Adds the weights as they were without the values' scales to the sums of the thread's two rows.
  ATTNGEN_DEVICE void add(const float (&weights)[kN / 2], float (&sum)[2]) const {
#pragma unroll
    for (int i = 0; i < kN / 2; i += 4) {
      const float2 factor = reciprocals(i);
      sum[0] += weights[i] * factor.x + weights[i + 1] * factor.y;
      sum[1] += weights[i + 2] * factor.x + weights[i + 3] * factor.y;
    }
  }

 private:
  ATTNGEN_DEVICE u32 place_of(int i) const { return base + (i * 2 + (lane & 3) * 2) * 4; }
};

}  // namespace attngen
