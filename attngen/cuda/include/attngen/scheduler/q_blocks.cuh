// Which blocks of queries a tile of keys visits, and which of them need no mask.
#pragma once

#include "attngen/scheduler/block_range.cuh"

namespace attngen {

// The blocks of `kBlock` queries that see keys [first, last]. Masks give `col_range(ctx, j)` whose
// two ends never decrease with j. A block that reaches past the last query can be full: there
// the weights are 0 by an LSE of +inf.
template <int kBlock, class Masks>
ATTNGEN_HD BlockRange q_block_range(const Masks& masks, const Context& ctx, int first, int last) {
  const Range top = masks.col_range(ctx, first);
  const Range bottom = masks.col_range(ctx, last);
  BlockRange blocks = block_range<kBlock>(top, bottom, ctx.q_len);
  if (top.hi >= ctx.q_len) blocks.full_end = blocks.end;
  return blocks;
}

}  // namespace attngen
