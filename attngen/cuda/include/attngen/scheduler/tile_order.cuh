// The order in which tiles are handed out: heads whose keys and values share L2 stay together,
// and where tiles differ in length the short ones come last, so that all SMs finish together.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

struct TileCoord {
  int row_block;
  int head;
  int batch;
};

// tiles_m row blocks for each of total_heads = heads * batches heads. Groups of heads_per_group
// consecutive heads are finished one after another, inside a group all heads take the same row
// block in turn; the first `tail_rows` row blocks of every head are kept for the end. Consecutive
// are the heads of a sequence or, `by_head`, the sequences of a head, which may share what it
// reads.
struct TileOrder {
  int tiles_m;
  int heads;
  int total_heads;
  int heads_per_group;
  int tail_rows;
  bool by_head = false;

  // Tile `index` of tiles_m * total_heads. `kLongestFirst` starts at the last row block, which
  // under a causal mask sees the most keys.
  template <bool kLongestFirst>
  ATTNGEN_HD TileCoord at(int index) const {
    const int grouped_rows = tiles_m - tail_rows;
    const int grouped_tiles = grouped_rows * total_heads;
    const bool tail = index >= grouped_tiles;
    const int rows = tail ? tail_rows : grouped_rows;
    const int group_size = tail ? total_heads : heads_per_group;
    const int rest = tail ? index - grouped_tiles : index;
    const int group = rest / (rows * group_size);
    const int within = rest - group * rows * group_size;
    const int first_head = group * group_size;
    const int group_heads = min_of(total_heads - first_head, group_size);
    const int rank = within / group_heads;
    const int any_head = first_head + within - rank * group_heads;
    const int inner_size = by_head ? total_heads / heads : heads;
    const int outer = any_head / inner_size;
    const int inner = any_head - outer * inner_size;
    const int row = (tail ? grouped_rows : 0) + rank;
    return {kLongestFirst ? tiles_m - 1 - row : row, by_head ? outer : inner,
            by_head ? inner : outer};
  }
};

// Groups of heads that keep all CTAs busy for whole waves of tiles, where a tile of keys visits
// each block of queries for several heads, which L2 would not hold if tiles were far apart. Under a
// causal mask tiles that begin together, the longest first, with the last block, are at the same
// block at any time; a CTA that has ended a short one draws a long one of the next wave, and if
// those begin with their first block, they are at the same block, too, and all end together.
struct TileWaves {
  int heads_per_group;
  int count;  // of a group's waves

  // Whether a wave begins with the first blocks: that of tile `within` of a group's, behind so many
  // waves of the groups before.
  ATTNGEN_HD bool ascends(int waves, int within, int group_tiles) const {
    return (waves + within / max_of(1, ceil_div(group_tiles, count))) % 2 == 1;
  }
  // Whether so many tiles of a group are about its waves: more or fewer by one in 16.
  ATTNGEN_HD bool is_whole(int group_tiles, int ctas) const {
    const int off = group_tiles - count * ctas;
    return max_of(off, -off) * 16 <= count * ctas;
  }
};
// A tile, and whether it visits its first block first.
struct WaveTile {
  TileCoord tile;
  bool ascends;
};

constexpr int kWaveTries = 16;

// Of the fewest heads, of so many, whose tiles are about whole waves.
ATTNGEN_HD TileWaves tile_waves(int tiles_m, int ctas, int heads) {
  const int fewest = min_of(max_of(1, ctas / max_of(1, tiles_m)), heads);
  TileWaves best = {};
  int least = 0;
  for (int group = fewest; group <= min_of(heads, fewest + kWaveTries); ++group) {
    const int tiles = group * tiles_m;
    const int count = max_of(1, (tiles + ctas / 2) / ctas);
    const int whole = count * ctas;
    const int off = max_of(tiles - whole, whole - tiles);
    // In parts of its waves: off / whole below that of the best. Products are at most all tiles.
    if (group == fewest || off * best.count < least * count) {
      best = {group, count};
      least = off;
    }
    if (best.is_whole(tiles, ctas)) break;
  }
  return best;
}

// The units of rows before the end of row block `row_block` of `tiles_m`, kUnits each, the last of
// which ends with the last of `units`: what is left is above the first, whose rows see the fewest
// keys under a causal mask.
template <int kUnits>
ATTNGEN_HD int end_of_tile(int row_block, int tiles_m, int units) {
  return units - kUnits * (tiles_m - 1 - row_block);
}

}  // namespace attngen
