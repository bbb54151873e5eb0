// Transposition of 8-bit tiles in shared memory, for wgmma, which wants the reduction of an 8-bit
// product along the rows of both operands.
//
// Within each 16 keys, position 4 t + e of a transposed row holds key 8 (e / 2) + 2 t + e % 2. So
// the four weights that thread t of a row has from two groups of 8 accumulator columns are the four
// neighbours that it owns in wgmma's 8-bit A operand, and weights need no exchange between threads.
#pragma once

#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// In which order the 16 keys of a unit follow each other, as bytes of two registers: of each column
// two neighbouring keys of the first eight, and two of the others. As weights have them:
struct OfFragments {
  static constexpr u32 kEven = 0x6420;
  static constexpr u32 kOdd = 0x7531;
};
// Position 2 i + e holds key i + 8 e, as accumulators laid down by stage_transposed_bytes have
// them.
struct OfPairs {
  static constexpr u32 kEven = 0x6240;
  static constexpr u32 kOdd = 0x7351;
};

// How a warp transposes: what its lanes add to the places of a unit, 32 keys of 16 columns.
template <class Order>
struct TransposedUnit {
  u32 from;  // the lane's row, in bytes
  u32 to;
  u32 slot;
  u32 first;
  u32 second;

  ATTNGEN_DEVICE explicit TransposedUnit(int lane) {
    // Lane l addresses row l % 8 of the matrix l / 8 that it loads: keys in their order.
    from = lane * 128;
    // A register then holds two neighbouring columns of two neighbouring keys. Lanes of the first
    // half keep even columns in the first matrix that they store, those of the second half odd
    // ones, so that the eight rows of a store differ modulo 8 and meet no bank conflict.
    first = lane < 16 ? Order::kEven : Order::kOdd;
    second = lane < 16 ? Order::kOdd : Order::kEven;
    const u32 pair = lane & 7;
    const u32 is_odd = (pair >= 4) ^ ((lane >> 3) & 1);
    const u32 row = pair * 2 + is_odd;
    to = row * 128;
    slot = ((lane >> 4) ^ (row & 7)) * 16;
  }

  ATTNGEN_DEVICE void move(u32 load, u32 store) const {
    u32 raw[4];
    load_matrix_transposed_x4(raw, load);
    store_matrix_x4(store, permute_bytes(raw[0], raw[1], first),
                    permute_bytes(raw[0], raw[1], second), permute_bytes(raw[2], raw[3], first),
                    permute_bytes(raw[2], raw[3], second));
  }
};

// Both take kKeys keys of kColumns columns: from `source`, boxes of kKeys rows by 128 columns, to
// the keys from `key` on at `destination`, boxes of kColumns rows by 128 keys, both swizzled over
// 128 bytes. Addresses differ by constants where `key` is one.

// A warp of four: 16 of each 64 columns.
template <class Order>
struct ColumnTransposerTo {
  TransposedUnit<Order> unit;
  u32 from;
  u32 column;

  ATTNGEN_DEVICE ColumnTransposerTo(int warp, int lane)
      : unit(lane), from(unit.from + (warp ^ (lane & 7)) * 16), column(warp * 16) {}

  template <int kKeys, int kColumns>
  ATTNGEN_DEVICE void transpose(u32 source, u32 destination, int key) const {
#pragma unroll
    for (int part = 0; part < ceil_div(kColumns, 64); ++part) {
      if (kColumns % 64 != 0 && part * 64 + column >= kColumns) break;
      const u32 load = source + (from ^ (part % 2 * 64)) + part / 2 * (kKeys * 128);
      const u32 store = destination + unit.to + column * 128 + part * (64 * 128);
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        const int place = key / 32 + i;
        unit.move(load + i * (32 * 128),
                  store + place / 4 * (kColumns * 128) + ((place % 4 * 32) ^ unit.slot));
      }
    }
  }
};

using ColumnTransposer = ColumnTransposerTo<OfFragments>;

// A warp of three: each third unit of keys, of all columns.
struct KeyTransposer {
  TransposedUnit<OfFragments> unit;
  u32 from;
  int warp;

  ATTNGEN_DEVICE KeyTransposer(int warp, int lane)
      : unit(lane), from(unit.from + (lane & 7) * 16), warp(warp) {}

  template <int kKeys, int kColumns>
  ATTNGEN_DEVICE void transpose(u32 source, u32 destination, int key) const {
    static_assert(kKeys <= 96);
    if (kKeys < 96 && warp >= kKeys / 32) return;
    const int place = key / 32 + warp;
    const u32 load = source + from + warp * (32 * 128);
    const u32 store =
        destination + unit.to + place / 4 * (kColumns * 128) + ((place % 4 * 32) ^ unit.slot);
#pragma unroll
    for (int group = 0; group < kColumns / 16; ++group) {
      unit.move((load ^ (group % 8 * 16)) + group / 8 * (kKeys * 128), store + group * (16 * 128));
    }
  }
};

}  // namespace attngen
