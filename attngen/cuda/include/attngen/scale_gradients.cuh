// Factors of an 8-bit backward: how weights and gradients of scores are stored.
#pragma once

#include "attngen/scale.cuh"

namespace attngen {

// A scale within what float32 products of two of them hold. Below that every weight of at most 1 is
// stored as 0, above it every one that a row's sum shows as the largest number there is.
ATTNGEN_DEVICE float stored_scale(float scale) {
  return scale < 0x1p-60f ? 0x1p-60f : scale > 0x1p60f ? 0x1p60f : scale;
}
// By what weights are multiplied to be stored: as asked for, or `own`.
ATTNGEN_DEVICE float scale_of_weights(const void* scale_s, float own) {
  return scale_s ? stored_scale(read_scale(scale_s, 0)) : own;
}
// What a stored weight stands for.
ATTNGEN_DEVICE float descale_of_weights(const void* descale_s, float own) {
  return descale_s ? read_scale(descale_s, 0) : 1.f / own;
}

}  // namespace attngen
