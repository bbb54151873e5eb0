// Which blocks of queries a tile of keys visits, and which of them need no mask.
#pragma once

#include "attngen/scheduler/block_range.cuh"
#include "attngen/scheduler/kv_blocks.cuh"

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

// Where tiles of keys have turns at a block of queries, from the last keys to the first: of the
// blocks that a tile visits those from `summed_begin` on have had an earlier tile's, those from
// `last_begin` on get no later one's.
struct BlockTurns {
  int summed_begin;
  int last_begin;
};

// Blocks of a tile's first visits that consumers prepare themselves, at most: one a warpgroup.
constexpr int kMostFirstVisits = 2;

// Of the blocks from `begin` on that a tile visits before all others, those before `summed_begin`,
// how many its consumers prepare themselves, for the first head of a group.
ATTNGEN_HD int first_visits(int begin, int summed_begin) {
  return min_of(summed_begin - begin, kMostFirstVisits);
}

// Of the tile of `kTile` keys that begins at `first` and visits `blocks`.
template <int kBlock, int kTile, class Masks>
ATTNGEN_HD BlockTurns block_turns(const Masks& masks, const Context& ctx, int first,
                                  const BlockRange& blocks) {
  BlockTurns turns = {blocks.end, blocks.begin};
  if (first + kTile < ctx.kv_len) {
    const int last = min_of(first + 2 * kTile, ctx.kv_len) - 1;
    const BlockRange before = q_block_range<kBlock>(masks, ctx, first + kTile, last);
    if (before.begin < before.end) turns.summed_begin = max_of(before.begin, blocks.begin);
  }
  if (first > 0) {
    turns.last_begin = q_block_range<kBlock>(masks, ctx, first - kTile, first - 1).end;
  }
  return turns;
}

// Whether they prepare a block: the tile of `kTile` keys that is the first to see it, the last that
// does, is the first to see all up to it, too.
template <int kBlock, int kTile, class Masks>
ATTNGEN_HD bool is_first_visit(const Masks& masks, const Context& ctx, int block) {
  const int row = block * kBlock;
  const int last_row = min_of(row + kBlock, ctx.q_len) - 1;
  const BlockRange tiles = kv_block_range<kTile>(masks, ctx, row, last_row);
  if (tiles.begin >= tiles.end) return false;
  const int first = (tiles.end - 1) * kTile;
  const int last = min_of(first + kTile, ctx.kv_len) - 1;
  const int begin = q_block_range<kBlock>(masks, ctx, first, last).begin;
  return block < begin + kMostFirstVisits;
}

}  // namespace attngen
