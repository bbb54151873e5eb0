// The order in which tiles are handed out: heads whose keys and values share L2 stay together.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

struct TileCoord {
  int row_block;
  int head;
  int batch;
};

// tiles_m row blocks for each of `heads * batches` heads. Groups of `heads_per_group` consecutive
// heads are finished one after another; inside a group all heads take the same row block in turn.
struct TileOrder {
  int tiles_m;
  int heads;
  int total_heads;
  int heads_per_group;

  // Tile `index` of tiles_m * total_heads. `kLongestFirst` starts at the last row block, which
  // under a causal mask sees the most keys.
  template <bool kLongestFirst>
  ATTNGEN_HD TileCoord at(int index) const {
    const int group_tiles = tiles_m * heads_per_group;
    const int group = index / group_tiles;
    const int within = index - group * group_tiles;
    const int first_head = group * heads_per_group;
    const int group_heads = min_of(total_heads - first_head, heads_per_group);
    const int rank = within / group_heads;
    const int any_head = first_head + within - rank * group_heads;
    const int batch = any_head / heads;
    return {kLongestFirst ? tiles_m - 1 - rank : rank, any_head - batch * heads, batch};
  }
};

}  // namespace attngen
