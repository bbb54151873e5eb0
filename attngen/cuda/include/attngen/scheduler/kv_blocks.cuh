// Which blocks of keys a tile of query rows visits, and which of them need no mask.
#pragma once

#include "attngen/scheduler/block_range.cuh"

namespace attngen {

// The blocks of `kBlock` keys that rows [first, last] visit. Masks give `row_range(ctx, i)` whose
// two ends never decrease with i.
template <int kBlock, class Masks>
ATTNGEN_HD BlockRange kv_block_range(const Masks& masks, const Context& ctx, int first, int last) {
  return block_range<kBlock>(masks.row_range(ctx, first), masks.row_range(ctx, last), ctx.kv_len);
}

}  // namespace attngen
