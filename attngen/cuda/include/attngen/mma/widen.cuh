// Tiles of 8-bit numbers widened to 16 bits, for products whose other operand has as many.
#pragma once

#include "attngen/platform.cuh"
#if defined(__CUDACC__)
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#endif

namespace attngen {

// Where columns lie in a box's row of 128 bytes, swizzled: a slot is 16 bytes of the row, slots
// from 8 on are in the boxes after it; groups of 8 rows are kGroupBytes apart.
template <u32 kBoxBytes, u32 kGroupBytes = 1024>
ATTNGEN_HD constexpr u32 swizzled_slot(int row, int slot) {
  return slot / 8 * kBoxBytes + row / 8 * kGroupBytes + row % 8 * 128 + ((slot ^ row) & 7) * 16;
}

// A thread's share of kRows rows of kColumns columns that kThreads threads have together: of one
// row, so that eight neighbours differ in theirs modulo 8 and meet no bank conflict, every kStep-th
// chunk of 16 columns. Those are one slot with 8 bits and two with 16.
template <int kRows, int kColumns, int kThreads>
struct WideningShare {
  static constexpr int kStep = kThreads / kRows;
  static constexpr int kChunks = kColumns / 16;
  static constexpr int kShare = ceil_div(kChunks, kStep);
  static_assert(kThreads % kRows == 0 && kColumns % 16 == 0, "a thread has one row");
  int row;
  int first;

  ATTNGEN_HD explicit WideningShare(int thread) : row(thread % kRows), first(thread / kRows) {}
  ATTNGEN_HD int chunk(int n) const { return first + n * kStep; }
  // All threads have the same number of chunks, but perhaps for the last.
  ATTNGEN_HD bool has(int n) const { return (n + 1) * kStep <= kChunks || chunk(n) < kChunks; }
};

#if defined(__CUDACC__)
// Widens kRows rows of kColumns columns from `source`, in boxes of 128 columns and groups of rows,
// to `target`, in boxes of 64 columns, whose groups are 1024 bytes apart; rows from `rows` on
// become zeros, whatever they are. Both are where a row begins whose number is a multiple of 8. A
// thread has kTogether loads on their way at once; with 1 it needs the fewest registers.
template <class From, class To, int kRows, int kColumns, int kThreads, u32 kSourceBoxBytes,
          u32 kSourceGroupBytes, u32 kTargetBoxBytes, int kTogether>
ATTNGEN_DEVICE void widen_tile(u32 source, u32 target, int thread, int rows) {
  using Share = WideningShare<kRows, kColumns, kThreads>;
  const Share share(thread);
  constexpr int kUnrolled = kTogether > 1 ? ceil_div(Share::kShare, kTogether) : 1;
#pragma unroll kUnrolled
  for (int first = 0; first < Share::kShare; first += kTogether) {
    u32 bytes[kTogether][4];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (first + n >= Share::kShare || !share.has(first + n)) continue;
      load_shared_x4(bytes[n], source + swizzled_slot<kSourceBoxBytes, kSourceGroupBytes>(
                                            share.row, share.chunk(first + n)));
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (first + n >= Share::kShare || !share.has(first + n)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 wide[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 pairs[2];
          From::widen(pairs, share.row < rows ? bytes[n][2 * half + i] : 0);
          wide[2 * i] = To::from_widened(pairs[0]);
          wide[2 * i + 1] = To::from_widened(pairs[1]);
        }
        const int slot = 2 * share.chunk(first + n) + half;
        store_shared_x4(target + swizzled_slot<kTargetBoxBytes>(share.row, slot), wide);
      }
    }
  }
}
#endif

}  // namespace attngen
