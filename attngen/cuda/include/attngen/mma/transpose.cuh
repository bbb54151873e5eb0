// Transposition of 8-bit tiles in shared memory, for wgmma, which wants the reduction of an 8-bit
// product along the rows of both operands.
//
// Within each 16 keys, position 4 t + e of a transposed row holds key 8 (e / 2) + 2 t + e % 2. So
// the four weights that thread t of a row has from two groups of 8 accumulator columns are the four
// neighbours that it owns in wgmma's 8-bit A operand, and weights need no exchange between threads.
#pragma once

#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// 16 columns of a block of kKeys keys, by one warp: from `source`, boxes of kKeys rows by 128
// columns, to `destination`, boxes of kColumns rows by 128 keys, both swizzled over 128 bytes.
template <int kKeys, int kColumns>
ATTNGEN_DEVICE void transpose_columns(u32 source, u32 destination, int column, int lane) {
  // Lane l addresses row l % 8 of the matrix l / 8 that it loads: keys in their order.
  const u32 from =
      source + column / 128 * (kKeys * 128) + lane * 128 + (((column / 16) & 7) ^ (lane & 7)) * 16;
  // A register then holds two neighbouring columns of two neighbouring keys. Lanes of the first
  // half keep even columns in the first matrix that they store, those of the second half odd ones,
  // so that the eight rows of a store differ modulo 8 and meet no bank conflict.
  const u32 even = 0x6420;
  const u32 odd = 0x7531;
  const u32 first = lane < 16 ? even : odd;
  const u32 second = lane < 16 ? odd : even;
  const u32 pair = lane & 7;
  const u32 is_odd = (pair >= 4) ^ ((lane >> 3) & 1);
  const u32 row = column + pair * 2 + is_odd;
  const u32 to = destination + row * 128;
  const u32 slot = (lane >> 4) ^ (row & 7);
#pragma unroll
  for (int unit = 0; unit < kKeys / 32; ++unit) {
    u32 raw[4];
    load_matrix_transposed_x4(raw, from + unit * (32 * 128));
    store_matrix_x4(to + unit / 4 * (kColumns * 128) + (((unit * 2) & 7) ^ slot) * 16,
                    permute_bytes(raw[0], raw[1], first), permute_bytes(raw[0], raw[1], second),
                    permute_bytes(raw[2], raw[3], first), permute_bytes(raw[2], raw[3], second));
  }
}

}  // namespace attngen
