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
// Tiles of a schedule at most, beside which a number for each CTA is left: sequences that lie over
// each other may have more.
constexpr int kMostTiles = 0x7fff0000;
ATTNGEN_HD int add_tiles(int some, int others) {
  const u32 sum = static_cast<u32>(some) + static_cast<u32>(others);
  return static_cast<int>(min_of(sum, static_cast<u32>(kMostTiles)));
}
ATTNGEN_HD int tiles_of_heads(int tiles, int heads) {
  const long long all = static_cast<long long>(tiles) * heads;
  return static_cast<int>(min_of(all, static_cast<long long>(kMostTiles)));
}
// Under a window so many heads are worked on together, however many heads of queries share each.
constexpr int kFewHeads = 4;

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
  u32 before = 0;  // where tiles are asked for by waves, those of the sequences before

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

  // The same from the first row block, in waves of tiles that keep `ctas` busy; none are kept for
  // the end.
  ATTNGEN_HD WaveTile at_wave(int index, int ctas) {
    ScheduledSequence found = sequences()[place];
    TileWaves own = tile_waves(found.tiles, ctas, heads);
    while (found.end <= index) {
      // Where these are about whole waves, they count as such: what is off would add up.
      const int tiles = own.heads_per_group * found.tiles;
      const bool whole = own.is_whole(tiles, ctas);
      before +=
          whole ? ceil_div(heads, own.heads_per_group) * own.count * ctas : found.tiles * heads;
      found = sequences()[++place];
      own = tile_waves(found.tiles, ctas, heads);
    }
    const int group = own.heads_per_group;
    const int begin = found.end - found.tiles * heads;
    const int first_head = (index - begin) / (found.tiles * group) * group;
    const int within = index - begin - first_head * found.tiles;
    const int group_heads = min_of(heads - first_head, group);
    const int rank = within / group_heads;
    const TileCoord tile = {rank, first_head + within - rank * group_heads, found.batch};
    // Short sequences share waves.
    const u32 waves = (before + ctas / 2) / ctas + first_head / group * own.count;
    return {tile, own.ascends(waves, within, group * found.tiles)};
  }
};

// A schedule of few sequences has entries for so many; those of none are behind all others, without
// tiles.
constexpr int kFewSequences = 32;

// Where one of them stands, those first whose tiles take longer, and up to which tile of each head:
// `lengths` says what a tile of each takes, -1 where there is none, `tiles` how many there are.
struct OrderPlace {
  int place;
  int end;
  int tail_end;  // of what is kept for the end, behind all others
  int all;
};
template <int kTailShare>
ATTNGEN_HD OrderPlace place_among_few(const int* lengths, const int* tiles, int batch) {
  OrderPlace found = {0, 0, 0, 0};
  int rest = 0;
  for (int other = 0; other < kFewSequences; ++other) {
    const int longer = lengths[other] - lengths[batch];
    const int kept = kept_tiles<kTailShare>(tiles[other]);
    const bool before = longer > 0 || (longer == 0 && other <= batch);
    found.place += before;
    found.end += before ? tiles[other] - kept : 0;
    found.tail_end += before ? kept : 0;
    rest += tiles[other] - kept;
    found.all += tiles[other];
  }
  found.tail_end += rest;
  return found;
}
// Its entries, and with those of sequence 0 the schedule's.
template <int kTailShare>
ATTNGEN_HD void write_few(ScheduledSequence* schedule, OrderPlace at, int batch, int tiles,
                          int heads, int heads_per_group) {
  schedule[at.place] = {batch, tiles_of_heads(at.end, heads), tiles, heads_per_group};
  if (kTailShare > 0) {
    schedule[kFewSequences + at.place] = {batch, tiles_of_heads(at.tail_end, heads), tiles, 0};
  }
  if (batch == 0) schedule[0] = {kOrdered, tiles_of_heads(at.all, heads), 0, 0};
}

// Lengths sorted into classes, longer ones into higher classes: up to 63 each into its own, then 32
// to an octave.
constexpr int kLengthClasses = 1024;
ATTNGEN_HD int length_class(int length) {
  int octave = 0;
  while ((length >> octave) >= 64) ++octave;
  return octave * 32 + (length >> octave);
}

}  // namespace attngen
