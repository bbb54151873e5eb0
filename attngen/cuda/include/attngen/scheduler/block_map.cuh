// Which blocks of one axis a tile of the other sees under a mask that was made before: a bit for
// each granule of the one and of the other that says whether some pair of theirs takes part, and
// one that says whether all do.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

constexpr int kGranule = 64;  // positions of either axis that share a bit
constexpr int kNoBlock = 1 << 30;

// The bits of a tile: `count` rows of `words` words each, `stride` words apart, which as many of
// the other kind follow. A block is seen where it shares a position with a granule whose bit is set
// in one of them.
struct BlockMap {
  const u32* rows;
  int stride;
  int count;
  int words;

  // One of its rows.
  ATTNGEN_HD BlockMap part(int row) const { return {rows + row * stride, stride, 1, words}; }
  ATTNGEN_HD u32 word(int place) const {
    u32 found = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int row = 0; row < count; ++row) found |= rows[row * stride + place];
    return found;
  }
  // The first block of `kBlock` positions from `block` on that is seen; kNoBlock where none is.
  template <int kBlock>
  ATTNGEN_HD int from(int block) const {
    const int first = block * kBlock / kGranule;
    u32 hidden = (1u << first % 32) - 1;
    for (int place = first / 32; place < words; ++place) {
      const u32 seen = word(place) & ~hidden;
      if (seen != 0) {
        const int granule = place * 32 + lowest_bit(seen);
        return max_of(block, granule * kGranule / kBlock);
      }
      hidden = 0;
    }
    return kNoBlock;
  }
  // The last block before `end` that is seen; -1 where none is.
  template <int kBlock>
  ATTNGEN_HD int before(int end) const {
    const int last = min_of((end * kBlock + kGranule - 1) / kGranule, words * 32) - 1;
    u32 shown = ~0u >> (31 - last % 32);
    for (int place = last / 32; place >= 0 && last >= 0; --place) {
      const u32 seen = word(place) & shown;
      if (seen != 0) {
        const int granule = place * 32 + highest_bit(seen);
        return min_of(end - 1, (granule * kGranule + kGranule - 1) / kBlock);
      }
      shown = ~0u;
    }
    return -1;
  }
  // Whether all pairs of the tile and a block take part.
  template <int kBlock>
  ATTNGEN_HD bool is_full(int block) const {
    const int first = block * kBlock / kGranule;
    const int last = (block * kBlock + kBlock - 1) / kGranule;
    for (int row = 0; row < count; ++row) {
      const u32* whole = rows + row * stride + words;
      for (int granule = first; granule <= last; ++granule) {
        if (granule >= words * 32 || (whole[granule / 32] >> granule % 32 & 1) == 0) return false;
      }
    }
    return true;
  }
  // How many blocks from `begin` on, before `end`, are seen.
  template <int kBlock>
  ATTNGEN_HD int count_of(int begin, int end) const {
    int found = 0;
    for (int block = from<kBlock>(begin); block < end; block = from<kBlock>(block + 1)) ++found;
    return found;
  }

 private:
  ATTNGEN_HD static int lowest_bit(u32 bits) {
#if defined(__CUDACC__)
    return __ffs(static_cast<int>(bits)) - 1;
#else
    return __builtin_ctz(bits);
#endif
  }
  ATTNGEN_HD static int highest_bit(u32 bits) {
#if defined(__CUDACC__)
    return 31 - __clz(static_cast<int>(bits));
#else
    return 31 - __builtin_clz(bits);
#endif
  }
};

}  // namespace attngen
