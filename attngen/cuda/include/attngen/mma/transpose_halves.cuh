// Transposition of 8-bit tiles whose columns make two images.
#pragma once

#include "attngen/mma/transpose.cuh"

namespace attngen {

// A warp of four: every fourth 16 columns.
struct HalfTransposer {
  TransposedUnit<OfFragments> unit;
  u32 from;
  int warp;

  ATTNGEN_DEVICE HalfTransposer(int warp, int lane)
      : unit(lane), from(unit.from + (lane & 7) * 16), warp(warp) {}

  // Takes kKeys keys of 2 kColumns columns, from `source`, boxes of kKeys rows by 128 columns, to
  // the keys from `key` on, of 128, of two images of kColumns rows, kImageBytes apart.
  template <int kKeys, int kColumns, u32 kImageBytes>
  ATTNGEN_DEVICE void transpose(u32 source, u32 image, int key) const {
    constexpr int kGroups = kColumns / 16;
#pragma unroll
    for (int first = 0; first < 2 * kGroups; first += 4) {
      const int group = first + warp;
      if (group >= 2 * kGroups) break;
      const int half = group >= kGroups;
      const u32 load = source + (from ^ (group % 8 * 16)) + group / 8 * (kKeys * 128);
      const u32 store =
          image + unit.to + half * kImageBytes + (group - half * kGroups) * (16 * 128);
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        unit.move(load + i * (32 * 128), store + (((key / 32 + i) * 32) ^ unit.slot));
      }
    }
  }
};

}  // namespace attngen
