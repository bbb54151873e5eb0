// Transposition of 8-bit tiles in shared memory, for wgmma, which wants the reduction of an 8-bit
// product along the rows of both operands.
//
// Within each 16 keys, position 4 t + e of a transposed row holds key 8 (e / 2) + 2 t + e % 2. So
// the four weights that thread t of a row has from two groups of 8 accumulator columns are the four
// neighbours that it owns in wgmma's 8-bit A operand, and weights need no exchange between threads.
#pragma once

#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// A warp's share of the columns: 16 of each 64.
struct ColumnTransposer {
  u32 from;  // the lane's row and column of the first 16 columns, in bytes
  u32 to;
  u32 slot;
  u32 column;
  u32 first;
  u32 second;

  ATTNGEN_DEVICE ColumnTransposer(int warp, int lane) {
    // Lane l addresses row l % 8 of the matrix l / 8 that it loads: keys in their order.
    from = lane * 128 + (warp ^ (lane & 7)) * 16;
    // A register then holds two neighbouring columns of two neighbouring keys. Lanes of the first
    // half keep even columns in the first matrix that they store, those of the second half odd
    // ones, so that the eight rows of a store differ modulo 8 and meet no bank conflict.
    const u32 even = 0x6420;
    const u32 odd = 0x7531;
    first = lane < 16 ? even : odd;
    second = lane < 16 ? odd : even;
    const u32 pair = lane & 7;
    const u32 is_odd = (pair >= 4) ^ ((lane >> 3) & 1);
    column = warp * 16;
    const u32 row = column + pair * 2 + is_odd;
    to = row * 128;
    slot = ((lane >> 4) ^ (row & 7)) * 16;
  }

  // kKeys keys of kColumns columns: from `source`, boxes of kKeys rows by 128 columns, to the keys
  // from `key` on at `destination`, boxes of kColumns rows by 128 keys, both swizzled over 128
  // bytes. Addresses differ by constants where `key` is one.
  template <int kKeys, int kColumns>
  ATTNGEN_DEVICE void transpose(u32 source, u32 destination, int key) const {
#pragma unroll
    for (int part = 0; part < ceil_div(kColumns, 64); ++part) {
      if (kColumns % 64 != 0 && part * 64 + column >= kColumns) break;
      const u32 load = source + (from ^ (part % 2 * 64)) + part / 2 * (kKeys * 128);
      const u32 store = destination + to + part * (64 * 128);
#pragma unroll
      for (int unit = 0; unit < kKeys / 32; ++unit) {
        const int place = key / 32 + unit;
        u32 raw[4];
        load_matrix_transposed_x4(raw, load + unit * (32 * 128));
        store_matrix_x4(store + place / 4 * (kColumns * 128) + ((place % 4 * 32) ^ slot),
                        permute_bytes(raw[0], raw[1], first), permute_bytes(raw[0], raw[1], second),
                        permute_bytes(raw[2], raw[3], first),
                        permute_bytes(raw[2], raw[3], second));
      }
    }
  }
};

}  // namespace attngen
