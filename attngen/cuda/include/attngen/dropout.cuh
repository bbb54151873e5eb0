// The dropout mask: one frozen function of (seed, offset, batch, head, i, j), as the reference's
// dropout.py defines it.
//
// A Philox call decides 16 elements: rows {i, i + 1, i + 8, i + 9} and columns {j, j + 1, j + 8,
// j + 9}. Of a 16 x 16 tile of an accumulator, lanes l and l ^ 4 need the same call, two of its
// words each. So a lane computes the calls of every other tile, and the two exchange what the other
// needs.
#pragma once

#include "attngen/platform.cuh"
#if defined(__CUDACC__)
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/wgmma.cuh"
#endif

namespace attngen {

#if !defined(__CUDACC__)
inline u64 wide_product(u32 a, u32 b) { return static_cast<u64>(a) * b; }
// prmt: the upper bit of a nibble asks for eight copies of its byte's sign.
inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> (4 * i) & 15;
    const u32 byte = ((nibble & 4) != 0 ? high : low) >> (8 * (nibble & 3)) & 255;
    result |= ((nibble & 8) != 0 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return result;
}
#endif

// Philox-4x32-10: four random words from four counter words and two key words.
// Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
ATTNGEN_HD void philox(u32 (&words)[4], u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  ATTNGEN_UNROLL
  for (int round = 0; round < 10; ++round) {
    const u64 a = wide_product(0xD2511F53u, c0);
    const u64 b = wide_product(0xCD9E8D57u, c2);
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// What the calls of one head of one sequence have in common.
struct DropoutKey {
  u32 k0;
  u32 k1;
};
// state: int64 [2], seed and offset.
ATTNGEN_HD DropoutKey dropout_key(const long long* state, int batch, int head) {
  const u64 seed = state[0];
  const u64 offset = state[1];
  u32 words[4];
  philox(words, batch, head, static_cast<u32>(offset), static_cast<u32>(offset >> 32),
         static_cast<u32>(seed), static_cast<u32>(seed >> 32));
  return {words[0], words[1]};
}

// Bytes below a threshold, four at once. The host gives the threshold in every byte less `high`,
// which is 0x80 in every byte where the threshold is at least that (256 drops everything), else 0.
struct DropThreshold {
  u32 low;
  u32 high;

  // The upper bit of each byte: whether that byte is dropped. Other bits mean nothing.
  ATTNGEN_HD u32 below(u32 bytes) const {
    const u32 reaches = (bytes | 0x80808080u) - low;  // no byte borrows
    return ~((bytes & reaches) | ((bytes | reaches) & ~high));
  }
};

// Of a thread's elements in a 16 x 16 tile, whether each is dropped: the upper bit of byte b of
// `even` decides the element in the thread's first column of 8, that of `odd` the one beside it.
struct DropWords {
  u32 even;
  u32 odd;
};
// The byte that decides: `half` is the row's (0, or 8 below), `right` the column's.
template <bool kKeysAreRows>
ATTNGEN_HD constexpr int drop_byte(int half, int right) {
  return kKeysAreRows ? right + 2 * half : half + 2 * right;
}
// The two words of a call that serve a thread whose first row is odd, or even.
template <bool kKeysAreRows>
ATTNGEN_HD DropWords words_of_row(const u32 (&call)[4], bool odd_row) {
  if (kKeysAreRows) return {odd_row ? call[2] : call[0], odd_row ? call[3] : call[1]};
  return {odd_row ? call[1] : call[0], odd_row ? call[3] : call[2]};
}

// The calls of a thread's rows. kKeysAreRows: the tile is S^T, its rows are keys; else S.
template <bool kKeysAreRows>
struct DropCalls {
  DropoutKey key;
  u32 row;     // counter of the thread's rows
  u32 column;  // counter of its first columns
  bool odd_row;

  // row, column: positions of the fragment's first row and column, multiples of 16.
  ATTNGEN_HD DropCalls(DropoutKey key, int row, int column, int lane)
      : key(key), row(row / 4 + (lane >> 3)), column(column / 4 + (lane & 3)), odd_row(lane & 4) {}

  // That of the tile of 16 columns from 16 * tile.
  ATTNGEN_HD void call(u32 (&words)[4], int tile) const {
    const u32 at = column + 4 * tile;
    philox(words, kKeysAreRows ? at : row, kKeysAreRows ? row : at, 0, 0, key.k0, key.k1);
  }
};

// All decisions of a thread for a fragment of kN columns: bit 7 - t of each byte is that of tile t.
template <int kN>
struct DropBits {
  static_assert(kN % 16 == 0 && kN <= 128, "eight tiles fill a byte");
  static constexpr int kTiles = kN / 16;
  DropWords bits;

  // Tiles join from the last to the first, each shifting those after it.
  ATTNGEN_HD void join(DropWords words, const DropThreshold& threshold) {
    bits.even = (threshold.below(words.even) & 0x80808080u) | (bits.even >> 1 & 0x7f7f7f7fu);
    bits.odd = (threshold.below(words.odd) & 0x80808080u) | (bits.odd >> 1 & 0x7f7f7f7fu);
  }
  // Whether element `index` of the accumulator is dropped, as the sign bit.
  template <bool kKeysAreRows>
  ATTNGEN_HD u32 sign(int index) const {
    const int byte = drop_byte<kKeysAreRows>((index >> 1) & 1, (index >> 2) & 1);
    return (index & 1 ? bits.odd : bits.even) << (24 - 8 * byte + index / 8) & 0x80000000u;
  }

  // exchange(words, tile): what the other lane passes for the same two tiles, of which this one has
  // computed `tile`.
  template <bool kKeysAreRows, class Exchange>
  ATTNGEN_HD void draw(const DropCalls<kKeysAreRows>& calls, const DropThreshold& threshold,
                       Exchange exchange) {
    bits = {0, 0};
    u32 words[4];
    if (kTiles % 2 != 0) {
      calls.call(words, kTiles - 1);
      join(words_of_row<kKeysAreRows>(words, calls.odd_row), threshold);
    }
    ATTNGEN_UNROLL
    for (int tile = kTiles / 2 * 2 - 2; tile >= 0; tile -= 2) {
      calls.call(words, tile + calls.odd_row);
      const DropWords own = words_of_row<kKeysAreRows>(words, calls.odd_row);
      const DropWords passed = words_of_row<kKeysAreRows>(words, !calls.odd_row);
      const DropWords other = exchange(passed, tile + calls.odd_row);
      join(calls.odd_row ? own : other, threshold);
      join(calls.odd_row ? other : own, threshold);
    }
  }

  // Zeroes the dropped ones among weights packed as 16-bit pairs.
  template <bool kKeysAreRows>
  ATTNGEN_HD void drop(u32 (&packed)[kN / 4]) const {
    ATTNGEN_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 even = bits.even << tile;
      const u32 odd = bits.odd << tile;
      ATTNGEN_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        const u32 byte = drop_byte<kKeysAreRows>(pair & 1, pair >> 1);
        // Two copies of the sign of a byte of each word.
        packed[4 * tile + pair] &= ~permute_bytes(even, odd, 0xCC88u + byte * 0x1111u);
      }
    }
  }

#if defined(__CUDACC__)
  template <bool kKeysAreRows>
  ATTNGEN_DEVICE void draw(const DropCalls<kKeysAreRows>& calls, const DropThreshold& threshold) {
    draw(calls, threshold, [](DropWords words, int) -> DropWords {
      return {__shfl_xor_sync(~0u, words.even, 4), __shfl_xor_sync(~0u, words.odd, 4)};
    });
    finish_first(bits.even ^ bits.odd);
  }

  // Makes the dropped ones among weights negative (or -0), so that one register has both.
  template <bool kKeysAreRows>
  ATTNGEN_DEVICE void mark(float (&weights)[kN / 2]) const {
    ATTNGEN_UNROLL
    for (int i = 0; i < kN / 2; ++i) {
      weights[i] = __uint_as_float(__float_as_uint(weights[i]) ^ sign<kKeysAreRows>(i));
    }
  }
#endif
};

}  // namespace attngen
