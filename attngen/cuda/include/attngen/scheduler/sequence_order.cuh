// The order in which tiles are handed out where lengths vary: sequences whose tiles take longest
// first, inside a sequence heads that share L2 together; of all sequences the shortest tiles last,
// so that all SMs finish together.
#pragma once

#include "attngen/scheduler/tile_order.cuh"

namespace attngen {

// A sequence in a schedule, with `tiles` tiles a head; `end` tiles are its own, of all heads, and
// of the entries before it. A schedule is an array of these: the first one's `end` counts all
// tiles, and its `batch` is kOrdered once all others are written. Where each head's last tiles are
// kept for the end, these have entries of their own, behind all others, whose heads_per_group is 0.
struct alignas(16) ScheduledSequence {
  int batch;
  int end;
  int tiles;
  int heads_per_group;
};

constexpr int kOrdered = 0x6f726421;

// Of a head's tiles those that are kept for the end.
template <int kTailShare>
ATTNGEN_HD int kept_tiles(int tiles) {
  if constexpr (kTailShare > 0) return tiles / kTailShare;
  return 0;
}

// Finds tiles by their number, which may only grow from one question to the next.
struct SequenceOrder {
  const void* schedule;
  int heads;
  int place = 1;

  ATTNGEN_HD const ScheduledSequence* sequences() const {
    return static_cast<const ScheduledSequence*>(schedule);
  }
  ATTNGEN_HD int tiles() const { return sequences()->end; }

  // Groups of heads_per_group heads one after another; inside a group all heads take the same row
  // block in turn, with kLongestFirst from the last. One tile of kTailShare of each head is kept
  // for the end; 0 keeps none.
  template <bool kLongestFirst, int kTailShare>
  ATTNGEN_HD TileCoord at(int index) {
    while (sequences()[place].end <= index) ++place;
    const ScheduledSequence found = sequences()[place];
    const int kept = kept_tiles<kTailShare>(found.tiles);
    const bool tail = kTailShare > 0 && found.heads_per_group == 0;
    const int rows = tail ? kept : found.tiles - kept;
    const int group = tail ? heads : found.heads_per_group;
    int within = index - (found.end - rows * heads);
    const int first_head = within / (rows * group) * group;
    within -= first_head * rows;
    const int group_heads = min_of(heads - first_head, group);
    const int rank = within / group_heads;
    const int row = (tail ? found.tiles - kept : 0) + rank;
    const int head = first_head + within - rank * group_heads;
    return {kLongestFirst ? found.tiles - 1 - row : row, head, found.batch};
  }
};

// Lengths sorted into classes, longer ones into higher classes: up to 63 each into its own, then 32
// to an octave.
constexpr int kLengthClasses = 1024;
ATTNGEN_HD int length_class(int length) {
  int octave = 0;
  while ((length >> octave) >= 64) ++octave;
  return octave * 32 + (length >> octave);
}

// Where packed sequences begin anywhere, each has blocks of kBlock rows of its own in a workspace.
template <int kBlock>
ATTNGEN_HD int first_block(const int* offsets, int batch) {
  return offsets[batch] / kBlock + batch;
}
// The sequence whose blocks `block` is among, or behind which it lies unused; the first one for
// those before it, too.
template <int kBlock>
ATTNGEN_HD int sequence_of_block(const int* offsets, int sequences, int block) {
  int low = 0;
  int high = sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_block<kBlock>(offsets, middle) <= block ? low : high) = middle;
  }
  return low;
}

}  // namespace attngen
