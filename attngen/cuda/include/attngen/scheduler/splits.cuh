// Which blocks of keys a CTA has where keys are split.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

// Blocks of split `index` out of `count`: all splits but the last ones take equally many. It
// depends on the sequence alone, so that a result does not change with its neighbours.
ATTNGEN_HD Range split_range(Range blocks, int index, int count) {
  const int each = ceil_div(max_of(blocks.hi - blocks.lo, 0), count);
  const int lo = min_of(blocks.lo + index * each, blocks.hi);
  return {lo, min_of(lo + each, blocks.hi)};
}

}  // namespace attngen
