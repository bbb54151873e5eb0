// The blocks of one axis that a tile of the other visits, and which of them need no mask.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

// Blocks [begin, end) hold every position that some position of the tile pairs with; those in
// [full_begin, full_end) hold only positions that every position of the tile pairs with. Always
// begin <= full_begin <= full_end <= end.
struct BlockRange {
  int begin;
  int full_begin;
  int full_end;
  int end;
};

// The blocks of `kBlock` positions out of `length` for a tile whose first position pairs with
// `top` and whose last with `bottom`; the ends of the ranges between never decrease, so these two
// bound them all.
template <int kBlock>
ATTNGEN_HD BlockRange block_range(Range top, Range bottom, int length) {
  const Range seen = {max_of(top.lo, 0), min_of(bottom.hi, length)};
  const Range shared = {max_of(bottom.lo, 0), min_of(top.hi, length)};
  BlockRange blocks;
  blocks.begin = seen.lo / kBlock;
  blocks.end = max_of(ceil_div(max_of(seen.hi, 0), kBlock), blocks.begin);
  blocks.full_begin = min_of(ceil_div(shared.lo, kBlock), blocks.end);
  blocks.full_end = min_of(max_of(shared.hi, 0) / kBlock, blocks.end);
  blocks.full_end = max_of(blocks.full_end, blocks.full_begin);
  if (seen.hi <= seen.lo) blocks = {blocks.begin, blocks.begin, blocks.begin, blocks.begin};
  return blocks;
}

// Where the blocks of some of a tile's rows end, `share`; the tile's end at `end`. Rows that see no
// key visit all of these, so that one at least tells them.
ATTNGEN_HD int end_of_share(const BlockRange& share, int end) {
  return share.begin < share.end ? share.end : end;
}

}  // namespace attngen
