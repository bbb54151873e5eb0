// The dropout mask of a part of longer sequences, whose first query and key may stand anywhere.
//
// Where both stand at multiples of 16, calls serve the same elements as in dropout.cuh. Elsewhere
// each thread makes the call of each of its elements.
#pragma once

#include "attngen/dropout.cuh"

namespace attngen {

// The key of a head of one sequence, and where its first query and key stand in the whole.
struct PlacedDropoutKey : DropoutKey {
  int first_query = 0;
  int first_key = 0;
};

// The byte that decides the score of a query and a key.
ATTNGEN_HD u32 drop_byte_at(const DropoutKey& key, int query, int column) {
  u32 words[4];
  philox(words, (query >> 4) * 4 + (query >> 1 & 3), (column >> 4) * 4 + (column >> 1 & 3), 0, 0,
         key.k0, key.k1);
  const u32 even = query & 1 ? words[1] : words[0];
  const u32 odd = query & 1 ? words[3] : words[2];
  return (column & 1 ? odd : even) >> ((query >> 3 & 1) * 8 + (column >> 3 & 1) * 16) & 255;
}

// The calls of a thread's rows, as DropCalls has them; row, column: the fragment's first row and
// column in its sequence, any.
template <bool kKeysAreRows>
struct PlacedDropCalls {
  DropCalls<kKeysAreRows> whole;  // where both are multiples of 16
  int row;                        // of the thread
  int column;
  bool aligned;

  ATTNGEN_HD PlacedDropCalls(const PlacedDropoutKey& key, int row, int column, int lane)
      : PlacedDropCalls(static_cast<const DropoutKey&>(key),
                        Place{row + (kKeysAreRows ? key.first_key : key.first_query),
                              column + (kKeysAreRows ? key.first_query : key.first_key)},
                        lane) {}

  // The byte that decides element `index` of a fragment.
  ATTNGEN_HD u32 byte(int index) const {
    const int across = row + (index >> 1 & 1) * 8;
    const int along = column + (index >> 2) * 8 + (index & 1);
    return drop_byte_at(whole.key, kKeysAreRows ? along : across, kKeysAreRows ? across : along);
  }

 private:
  struct Place {  // of the fragment's first row and column in the whole
    int row;
    int column;
  };
  ATTNGEN_HD PlacedDropCalls(const DropoutKey& key, Place first, int lane)
      : whole(key, first.row, first.column, lane),
        row(first.row + lane / 4),
        column(first.column + (lane & 3) * 2),
        aligned((first.row | first.column) % 16 == 0) {}
};

// All decisions of a thread for a fragment of kN columns, an element at a time.
template <int kN, bool kKeysAreRows>
ATTNGEN_HD void decide_apart(DropBits<kN>& bits, const PlacedDropCalls<kKeysAreRows>& calls,
                             const DropThreshold& threshold) {
  bits.even = bits.odd = 0;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int i = 0; i < kN / 2; ++i) {
    const u32 kept = threshold.kept(calls.byte(i)) >> 7 & 1;
    const int byte = drop_byte<kKeysAreRows>(i >> 1 & 1, i >> 2 & 1);
    const u32 found = kept << (byte * 8 + drop_bit(i / 8));
    bits.even |= i & 1 ? 0 : found;
    bits.odd |= i & 1 ? found : 0;
  }
}

// The words of a thread for tile `tile` of a row of S, as DropWords has them.
struct DropPair {
  u32 even;
  u32 odd;
};
ATTNGEN_HD DropPair words_apart(const PlacedDropCalls<false>& calls, int tile) {
  DropPair pair = {0, 0};
#if defined(__CUDACC__)
#pragma unroll 1
#endif
  for (int i = 0; i < 8; ++i) {
    const u32 found = calls.byte(tile * 8 + i) << 8 * drop_byte<false>(i >> 1 & 1, i >> 2 & 1);
    pair.even |= i & 1 ? 0 : found;
    pair.odd |= i & 1 ? found : 0;
  }
  return pair;
}

// The calls of a row of S; row: the fragment's first row in its sequence, any.
struct PlacedDropRow {
  DropRow calls;  // where that stands at a multiple of 16
  PlacedDropoutKey key;
  int row;

  ATTNGEN_HD void begin(const PlacedDropoutKey& of_head, int first_row, int lane) {
    calls.begin(of_head, first_row + of_head.first_query, lane);
    key = of_head;
    row = first_row;
  }
};

#if defined(__CUDACC__)
template <int kN, bool kKeysAreRows>
ATTNGEN_DEVICE void draw(DropBits<kN>& bits, const PlacedDropCalls<kKeysAreRows>& calls,
                         const DropThreshold& threshold) {
  if (calls.aligned) {
    bits.draw(calls.whole, threshold);
  } else {
    decide_apart(bits, calls, threshold);
  }
}

template <int kN>
ATTNGEN_DEVICE void draw(const DropWords<kN>& words, const PlacedDropRow& row, int column,
                         int lane) {
  const PlacedDropCalls<false> calls(row.key, row.row, column, lane);
  if (calls.aligned) {
    words.draw(row.calls, column + row.key.first_key, lane);
    return;
  }
  __syncwarp();  // what is there has been read
#pragma unroll 1
  for (int tile = 0; tile < DropWords<kN>::kTiles; ++tile) {
    const DropPair own = words_apart(calls, tile);
    const u32 both[4] = {own.even, own.odd, __shfl_xor_sync(~0u, own.even, 4),
                         __shfl_xor_sync(~0u, own.odd, 4)};
    const u32 place = DropWords<kN>::place(lane) + tile * DropWords<kN>::kTileBytes;
    if ((lane & 4) == 0) store_shared_x4(words.base + place, both);  // of an even row and the next
  }
  __syncwarp();
}
#endif

}  // namespace attngen
