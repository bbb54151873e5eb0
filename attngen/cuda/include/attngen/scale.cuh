// Scale factors of 8-bit tensors: read from device memory, and the maxima that give the next ones.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// A float32 of a tensor of scales; 1 where there is no tensor.
ATTNGEN_DEVICE float read_scale(const void* scales, int index) {
  return scales ? __ldg(static_cast<const float*>(scales) + index) : 1.f;
}

// Raises the float32 at `target`, not negative, to x, which is the same in the whole warp and not
// negative either: such floats are ordered as their bits are.
ATTNGEN_DEVICE void atomic_max(float* target, float x, int lane) {
  if (lane == 0) atomicMax(reinterpret_cast<int*>(target), __float_as_int(x));
}

}  // namespace attngen
