// Scale factors of 8-bit tensors: read from device memory, and the maxima that give the next ones.
#pragma once

#include "attngen/maximum.cuh"

namespace attngen {

// A float32 of a tensor of scales; 1 where there is no tensor.
ATTNGEN_DEVICE float read_scale(const void* scales, int index) {
  return scales ? __ldg(static_cast<const float*>(scales) + index) : 1.f;
}

// What makes log2 units of products of 8-bit numbers. A descale of 0, or nearly, makes every score
// 0: so does this, beside which units of what scores add, and hidden scores of -inf, are still
// numbers.
ATTNGEN_DEVICE float log2_scale(float scale) { return scale < 0x1p-64f ? 0x1p-64f : scale; }
// A scale of weights within what float32 sums hold. Below that every weight is stored as 0; above
// it those from 2^-87 on, relative to their row's largest, as the largest number there is.
ATTNGEN_DEVICE float weight_scale(float scale) {
  return scale < 0x1p-100f ? 0x1p-100f : scale > 0x1p96f ? 0x1p96f : scale;
}
// The largest finite number where a factor is infinite.
ATTNGEN_DEVICE float limited(float factor) {
  return factor > kLargestFloat ? kLargestFloat : factor;
}

}  // namespace attngen
