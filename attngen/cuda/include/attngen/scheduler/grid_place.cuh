// Where a CTA stands in a grid of some for each head of each sequence.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

struct GridPlace {
  int index;  // among those of its head and sequence
  int head;
  int batch;
  int batches;
};

// Heads and sequences are the second and third axis of a grid, which has at most 65,535 of each;
// beyond these all CTAs are in the first.
ATTNGEN_DEVICE GridPlace grid_place(int ctas, int heads) {
  if (static_cast<int>(gridDim.x) == ctas) {
    return {static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
            static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z)};
  }
  const int any_head = static_cast<int>(blockIdx.x) / ctas;
  return {static_cast<int>(blockIdx.x) - any_head * ctas, any_head % heads, any_head / heads,
          static_cast<int>(gridDim.x) / ctas / heads};
}

}  // namespace attngen
