// The dropout mask: one frozen function of (seed, offset, batch, head, i, j), as the reference's
// dropout.py defines it.
//
// A Philox call decides 16 elements: rows {i, i + 1, i + 8, i + 9} and columns {j, j + 1, j + 8,
// j + 9}. Of a 16 x 16 tile of an accumulator, lanes l and l ^ 4 need the same call, two of its
// words each. So a lane computes the calls of every other tile, and the two exchange what the other
// needs: as bits by a shuffle (DropBits), or whole words through shared memory (DropWords).
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

// Philox-4x32-10: four random words from four counter words and two key words, or from what these
// are before round kFrom.
// Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
constexpr u32 kPhilox0 = 0xD2511F53u;
constexpr u32 kPhilox1 = 0xCD9E8D57u;
constexpr u32 kPhiloxKey0 = 0x9E3779B9u;  // what the key grows by in a round
constexpr u32 kPhiloxKey1 = 0xBB67AE85u;
template <int kFrom = 0>
ATTNGEN_HD void philox(u32 (&words)[4], u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  ATTNGEN_UNROLL
  for (int round = kFrom; round < 10; ++round) {
    const u64 a = wide_product(kPhilox0, c0);
    const u64 b = wide_product(kPhilox1, c2);
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
    k0 += kPhiloxKey0;
    k1 += kPhiloxKey1;
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

  // The upper bit of each byte: whether that byte is kept. The others are 0.
  ATTNGEN_HD u32 kept(u32 bytes) const {
    const u32 reaches = (bytes | 0x80808080u) - low;  // no byte borrows
    return ((bytes & reaches) | ((bytes | reaches) & ~high)) & 0x80808080u;
  }
};

// The byte of a word that decides: `half` is the row's (0, or 8 below), `right` the column's.
template <bool kKeysAreRows>
ATTNGEN_HD constexpr int drop_byte(int half, int right) {
  return kKeysAreRows ? right + 2 * half : half + 2 * right;
}
// Which of a call's words serve a thread whose first row is odd, or even: in its first column of 8
// (`odd_column` 0) and the one beside it.
template <bool kKeysAreRows>
ATTNGEN_HD u32 word_of(const u32 (&words)[4], bool odd_row, int odd_column) {
  if (kKeysAreRows) return odd_row ? words[2 + odd_column] : words[odd_column];
  return odd_row ? words[1 + 2 * odd_column] : words[2 * odd_column];
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

// The calls of a row of S, counter (row, column, 0, 0). Of the first two rounds' products one is of
// 0, and two are the row's alone and kept.
struct DropRow {
  DropoutKey key;
  u32 c3;      // after the first round
  u64 second;  // the second round's product of the third word

  // row: position of the fragment's first row, a multiple of 16.
  ATTNGEN_HD void begin(DropoutKey of_head, int row, int lane) {
    key = of_head;
    const u64 first = wide_product(kPhilox0, row / 4 + (lane >> 3));
    c3 = static_cast<u32>(first);
    second = wide_product(kPhilox1, static_cast<u32>(first >> 32) ^ key.k1);
  }
  ATTNGEN_HD void call(u32 (&words)[4], u32 column) const {
    const u64 first = wide_product(kPhilox0, column ^ key.k0);
    const u32 k0 = key.k0 + kPhiloxKey0;
    const u32 k1 = key.k1 + kPhiloxKey1;
    philox<2>(words, static_cast<u32>(second >> 32) ^ k0, static_cast<u32>(second),
              static_cast<u32>(first >> 32) ^ c3 ^ k1, static_cast<u32>(first), k0 + kPhiloxKey0,
              k1 + kPhiloxKey1);
  }
};

// Bit of a byte that tile `tile` of 16 columns has: the even ones those from 7 down, the odd ones
// those from 3 down.
ATTNGEN_HD constexpr int drop_bit(int tile) { return (tile % 2 == 0 ? 7 : 3) - tile / 2; }

// All decisions of a thread for a fragment of kN columns, 1 where an element is kept: bits of four
// bytes for its columns that are even, and for those that are odd.
template <int kN>
struct DropBits {
  static_assert(kN % 16 == 0 && kN <= 128, "eight tiles fill a byte");
  static constexpr int kTiles = kN / 16;
  static constexpr u32 kUpper = 0xf0f0f0f0u;  // of the even tiles
  u32 even;
  u32 odd;

  // The decisions of the thread's own calls, every other tile's, in the upper half of each byte.
  template <bool kKeysAreRows>
  ATTNGEN_HD static void decide(u32 (&own)[4], const DropCalls<kKeysAreRows>& calls,
                                const DropThreshold& threshold) {
    own[0] = own[1] = own[2] = own[3] = 0;
    ATTNGEN_UNROLL
    for (int tile = kTiles / 2 * 2 - 2; tile >= 0; tile -= 2) {
      u32 words[4];
      calls.call(words, tile + calls.odd_row);
      ATTNGEN_UNROLL
      for (int i = 0; i < 4; ++i) own[i] = threshold.kept(words[i]) | (own[i] >> 1 & 0x7f7f7f7fu);
    }
  }
  // What of them the thread beside needs, in one word.
  template <bool kKeysAreRows>
  ATTNGEN_HD static u32 passed(const u32 (&own)[4], bool odd_row) {
    const u32 first = word_of<kKeysAreRows>(own, !odd_row, 0);
    const u32 second = word_of<kKeysAreRows>(own, !odd_row, 1);
    return (first & kUpper) | (second >> 4 & ~kUpper);
  }
  // All of them, `other` being what that thread has passed.
  template <bool kKeysAreRows>
  ATTNGEN_HD void join(const u32 (&own)[4], u32 other, const DropCalls<kKeysAreRows>& calls,
                       const DropThreshold& threshold) {
    const u32 shift = calls.odd_row ? 4 : 0;
    const u32 mask = calls.odd_row ? ~kUpper : kUpper;
    even = (word_of<kKeysAreRows>(own, calls.odd_row, 0) >> shift & mask) |
           (other >> (4 - shift) & ~mask);
    odd = (word_of<kKeysAreRows>(own, calls.odd_row, 1) >> shift & mask) | (other << shift & ~mask);
    if (kTiles % 2 != 0) {  // the last tile: each computes its call
      u32 words[4];
      calls.call(words, kTiles - 1);
      even |= threshold.kept(word_of<kKeysAreRows>(words, calls.odd_row, 0)) >> kTiles / 2;
      odd |= threshold.kept(word_of<kKeysAreRows>(words, calls.odd_row, 1)) >> kTiles / 2;
    }
  }

  // Whether element `index` is dropped, as the sign bit.
  template <bool kKeysAreRows>
  ATTNGEN_HD u32 sign(int index) const {
    const int byte = drop_byte<kKeysAreRows>((index >> 1) & 1, (index >> 2) & 1);
    const int left = 31 - byte * 8 - drop_bit(index / 8);
    return ~((index & 1 ? odd : even) << left) & 0x80000000u;
  }

#if defined(__CUDACC__)
  template <bool kKeysAreRows>
  ATTNGEN_DEVICE void draw(const DropCalls<kKeysAreRows>& calls, const DropThreshold& threshold) {
    u32 own[4];
    decide(own, calls, threshold);
    const u32 other = __shfl_xor_sync(~0u, passed<kKeysAreRows>(own, calls.odd_row), 4);
    join(own, other, calls, threshold);
    finish_first(even ^ odd);
  }

  // Makes the dropped ones among weights negative (or -0), so that one register has both.
  template <bool kKeysAreRows>
  ATTNGEN_DEVICE void mark(float (&weights)[kN / 2]) const {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      weights[i] = __uint_as_float(__float_as_uint(weights[i]) ^ sign<kKeysAreRows>(i));
    }
  }
#endif
};

// The words of all calls of a warp for 16 rows of S and kN columns, in shared memory. Bytes that
// are compared as float16 numbers, two an instruction, become what weights are multiplied by: fewer
// of the integer instructions that are slow beside products than bits take, which have to be
// gathered and spread again.
template <int kN>
struct DropWords {
  static_assert(kN % 16 == 0, "whole tiles");
  static constexpr int kTiles = kN / 16;
  static constexpr int kCalls = (kTiles + 1) / 2;  // of a lane
  // 16 calls of 16 bytes, and as much more as keeps two tiles, which are stored at once, from the
  // same banks.
  static constexpr u32 kTileBytes = 16 * 16 + 64;
  static constexpr u32 kBytes = kTiles * kTileBytes;

  // Where the calls that a lane's rows and columns need lie, of the first tile.
  ATTNGEN_HD static constexpr u32 place(int lane) { return ((lane >> 3) * 4 + (lane & 3)) * 16; }
  // The tile of a lane's call: every other one; the last of an odd number is every lane's.
  ATTNGEN_HD static int tile_of(int call, int lane) {
    return 2 * call + (2 * call + 1 < kTiles ? lane >> 2 & 1 : 0);
  }
  // The column's counter of its call for a tile of the block from `column` on, a multiple of 16.
  ATTNGEN_HD static u32 counter(int column, int tile, int lane) {
    return column / 4 + 4 * tile + (lane & 3);
  }
  // Where a lane finds what its row needs of a tile, the words of its even and odd columns.
  ATTNGEN_HD static constexpr u32 half(int lane) { return place(lane) + (lane >> 2 & 1) * 8; }

  // A call's words in that order: those of an even row, then of an odd one.
  ATTNGEN_HD static void in_rows(u32* to, const u32 (&words)[4]) {
    to[0] = words[0];
    to[1] = words[2];
    to[2] = words[1];
    to[3] = words[3];
  }
  // The bytes that decide a register of weights (of the four of a tile) as -(1024 + byte) in
  // float16, from the words of the lane's even and odd columns; `signs` is 0xe400e400.
  ATTNGEN_HD static u32 number(u32 even, u32 odd, int index, u32 signs) {
    const u32 bytes = permute_bytes(even, odd, index >= 2 ? 0x7632u : 0x5410u);
    return permute_bytes(bytes, signs, index % 2 != 0 ? 0x7351u : 0x7250u);
  }

#if defined(__CUDACC__)
  u32 base;   // of the warp's part of shared memory
  u32 limit;  // -(1023 + threshold) in float16, twice

  ATTNGEN_DEVICE void draw(const DropRow& row, int column, int lane) const {
    u32 words[kCalls][4];
#pragma unroll
    for (int i = 0; i < kCalls; ++i) row.call(words[i], counter(column, tile_of(i, lane), lane));
    __syncwarp();  // what is there has been read
#pragma unroll
    for (int i = 0; i < kCalls; ++i) {
      u32 stored[4];
      in_rows(stored, words[i]);
      store_shared_x4(base + place(lane) + tile_of(i, lane) * kTileBytes, stored);
    }
    __syncwarp();
  }

  // Zeroes the dropped ones among weights packed as 16-bit pairs, and multiplies the others by what
  // float16's 1 is in their format.
  template <class Element>
  ATTNGEN_DEVICE void drop(u32 (&packed)[kN / 4], int lane) const {
    // Made of a parameter: where the compiler knows it, it moves it to a register for every use.
    const u32 signs = (limit & 0x80008000u) | 0x64006400u;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      u32 words[2];
      load_shared_x2(words, base + half(lane) + tile * kTileBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 kept = Fp16::excess(limit, number(words[0], words[1], i, signs));
        packed[4 * tile + i] = Element::multiply(packed[4 * tile + i], kept);
      }
    }
  }
#endif
};

}  // namespace attngen
