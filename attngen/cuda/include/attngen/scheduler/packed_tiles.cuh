// Tiles of packed sequences, which begin anywhere: each has tiles of its own, without a sum over
// those before it, and is found by one of them.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// kRows rows a tile, `rows_each` of a token. Those of sequence s begin at first(s), at least as
// many as its rows fill, whatever lies elsewhere: of a sequence in the tensor the last one is below
// tokens * rows_each / kRows + sequences. Two that follow each other share none.
template <int kRows, class Sequence>
struct PackedTiles {
  Sequence sequence;
  int sequences;
  int rows_each = 1;

  ATTNGEN_HD static int first_of(int first_token, int s, int rows_each = 1) {
    return first_token * rows_each / kRows + s;
  }
  ATTNGEN_HD int first(int s) const { return first_of(sequence.first_token(s), s, rows_each); }
  // The sequence among whose tiles `tile` is, or behind which it lies unused; the first one for
  // those before it, too. Sequences that do not lie in the tensor are passed over, so that it is
  // found if it follows the others that do, and they follow it.
  ATTNGEN_HD int sequence_of(int tile) const {
    int low = 0;
    int high = sequences;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      int tried = middle;
      while (tried < high && !sequence.lies(tried)) ++tried;
      const bool behind = tried < high && first(tried) <= tile;
      low = behind ? tried : low;
      high = behind ? high : middle;
    }
    return low;
  }
};

}  // namespace attngen
