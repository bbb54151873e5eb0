// Equal tiles for persistent CTAs, of kUnits units of rows each, and smaller ones where large ones
// would leave most CTAs without work in the end.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// A head's units [begin, end).
struct CutTile {
  int head;
  int begin;
  int end;
};

// `large` tiles of kUnits units for each of `heads` heads, its last ones, one head after another;
// then what is above, kSmall units a tile.
template <int kUnits, int kSmall>
struct CutTiles {
  int units;  // of a head
  int heads;
  int large;

  // As few small tiles as the last round needs for all of them to begin in it, or before: they take
  // less time than a large one. Else none but for what is left of each head.
  ATTNGEN_HD static CutTiles of(int units, int heads, int ctas) {
    CutTiles tiles = {units, heads, units / kUnits};
    const int rounds = static_cast<int>(static_cast<long long>(units) * heads / kUnits / ctas);
    const CutTiles cut = {units, heads, min_of(rounds * ctas / heads, tiles.large)};
    const int early = rounds * ctas - cut.large * heads;  // CTAs that the last large tiles leave
    return rounds > 0 && heads * cut.small() <= ctas + early ? cut : tiles;
  }

  ATTNGEN_HD int small() const { return ceil_div(units - large * kUnits, kSmall); }  // of a head
  ATTNGEN_HD int count() const { return heads * (large + small()); }

  ATTNGEN_HD CutTile at(int index) const {
    const int rest = units - large * kUnits;
    if (index < heads * large) {
      const int head = index / large;
      const int begin = rest + (index - head * large) * kUnits;
      return {head, begin, begin + kUnits};
    }
    index -= heads * large;
    const int head = index / small();
    const int end = rest - (index - head * small()) * kSmall;
    return {head, max_of(end - kSmall, 0), end};
  }
};

}  // namespace attngen
