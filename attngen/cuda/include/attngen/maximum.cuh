// Maxima of float32 over all that a grid meets.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Raises the float32 at `target`, not negative, to x, which is the same in the whole warp and not
// negative either: such floats are ordered as their bits are.
ATTNGEN_DEVICE void atomic_max(float* target, float x, int lane) {
  if (lane == 0) atomicMax(reinterpret_cast<int*>(target), __float_as_int(x));
}

// The same for numbers of either sign: the bits of negative ones are ordered the other way round,
// and as integers are above those of positive ones without a sign, below with one. Raising to -inf
// does nothing.
ATTNGEN_DEVICE void raise_to(float* target, float x, int lane) {
  if (lane != 0 || x == -kInfinity) return;
  const int bits = __float_as_int(x);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(target), bits);
  } else {
    atomicMin(reinterpret_cast<u32*>(target), static_cast<u32>(bits));
  }
}

}  // namespace attngen
