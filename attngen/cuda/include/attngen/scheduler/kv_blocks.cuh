// Which blocks of keys a tile of query rows visits, and which of them need no mask.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

// Blocks [begin, end) hold every key that some row of the tile sees; those in
// [full_begin, full_end) hold only keys that every row sees. Always
// begin <= full_begin <= full_end <= end.
struct BlockRange {
  int begin;
  int full_begin;
  int full_end;
  int end;
};

// The blocks of `kBlock` keys that rows [first, last] visit. Masks give `row_range(ctx, i)` whose
// two ends never decrease with i, so the first and the last row bound all those between.
template <int kBlock, class Masks>
ATTNGEN_HD BlockRange kv_block_range(const Masks& masks, const Context& ctx, int first, int last) {
  const Range top = masks.row_range(ctx, first);
  const Range bottom = masks.row_range(ctx, last);
  const Range seen = {max_of(top.lo, 0), min_of(bottom.hi, ctx.kv_len)};
  const Range shared = {max_of(bottom.lo, 0), min_of(top.hi, ctx.kv_len)};
  BlockRange blocks;
  blocks.begin = seen.lo / kBlock;
  blocks.end = max_of(ceil_div(max_of(seen.hi, 0), kBlock), blocks.begin);
  blocks.full_begin = min_of(ceil_div(shared.lo, kBlock), blocks.end);
  blocks.full_end = min_of(max_of(shared.hi, 0) / kBlock, blocks.end);
  blocks.full_end = max_of(blocks.full_end, blocks.full_begin);
  if (seen.hi <= seen.lo) blocks = {blocks.begin, blocks.begin, blocks.begin, blocks.begin};
  return blocks;
}

}  // namespace attngen
