// Which rows of which sequence a CTA has where keys are split, and which blocks of keys.
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

// Tiles of sequences that lie one after another: those of sequence s begin at first(s), at least as
// many as its rows fill, so that no sum over the sequences before it is needed.
template <int kRows>
struct PackedTiles {
  const int* seqlens;  // cumulative lengths
  int sequences;
  int rows_each;  // of a position: the heads that share a tile

  ATTNGEN_HD int first(int s) const { return (seqlens[s] - seqlens[0]) * rows_each / kRows + s; }
  ATTNGEN_HD int sequence_of(int tile) const {
    int lo = 0;
    int hi = sequences;
    while (hi - lo > 1) {
      const int middle = lo + (hi - lo) / 2;
      (first(middle) <= tile ? lo : hi) = middle;
    }
    return lo;
  }
};

}  // namespace attngen
