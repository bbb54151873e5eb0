// Dropout of weights that are stored in 16 bits, two neighbours of a row in a register.
#pragma once

#include "attngen/dropout_bytes.cuh"

namespace attngen {

// Which halves of register `pair` are kept of those that have a fragment's elements in their order,
// all bits of each.
ATTNGEN_HD u32 kept_pair(const KeptBits& kept, int pair) {
  const u32 low = kept.keeps(2 * pair) ? 0xffffu : 0u;
  const u32 high = kept.keeps(2 * pair + 1) ? 0xffff0000u : 0u;
  return low | high;
}

}  // namespace attngen
