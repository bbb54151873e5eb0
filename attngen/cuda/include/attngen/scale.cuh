// Scale factors of 8-bit tensors: read from device memory, and the maxima that give the next ones.
#pragma once

#include "attngen/maximum.cuh"

namespace attngen {

// A float32 of a tensor of scales; 1 where there is no tensor.
ATTNGEN_DEVICE float read_scale(const void* scales, int index) {
  return scales ? __ldg(static_cast<const float*>(scales) + index) : 1.f;
}

}  // namespace attngen
