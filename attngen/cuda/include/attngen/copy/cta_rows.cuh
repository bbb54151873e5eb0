// Rows that all threads of a CTA copy into swizzled boxes of 64 columns, without the copy engine.
#pragma once

#include "attngen/mma/atoms.cuh"

namespace attngen {

// Rows of one head of one sequence, which begin at multiples of 16 bytes. What
// lies at or beyond `rows` counts as 0 and is not read.
struct HeadRows {
  const char* first;
  long long row_bytes;
  int rows;

  ATTNGEN_DEVICE const char* at(int row) const { return first + row * row_bytes; }
};

// Those of sequence `batch` and head `head`, the first of which is row `token` of the batch's;
// strides are in elements.
template <int kElementBytes = 2>
ATTNGEN_DEVICE HeadRows head_rows(const void* tensor, long long batch, long long head,
                                  long long token, long long stride_batch, long long stride_head,
                                  long long stride_row, int rows) {
  const long long start = batch * stride_batch + head * stride_head + token * stride_row;
  return {static_cast<const char*>(tensor) + kElementBytes * start, kElementBytes * stride_row,
          rows};
}

// How kThreads threads divide a tile of kRows rows of kColumns elements: eight neighbours copy the
// 16-byte pieces of a row's box, and each has the same piece of every box.
template <int kThreads, int kColumns, int kRows>
struct RowShare {
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kPieces = ceil_div(kColumns, 16) * 2;  // whole steps of a product
  static constexpr int kBoxes = ceil_div(kColumns, 64);
  static constexpr u32 kBoxBytes = kRows * 128;
  static_assert(kRowsAtOnce % 8 == 0 && kRows % kRowsAtOnce == 0 && kColumns % 8 == 0);

  ATTNGEN_DEVICE static int piece() { return threadIdx.x % 8; }
  ATTNGEN_DEVICE static int row() { return threadIdx.x / 8; }
  // Where the thread's pieces of its first row go.
  ATTNGEN_DEVICE static u32 place() { return row() * 128 + ((piece() ^ row()) & 7) * 16; }
  // Copies the thread's pieces of a row to `target`, or zeros where it is not `there`. source: its
  // first piece.
  ATTNGEN_DEVICE static void copy(u32 target, const char* source, bool there) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box * 8 + 8 > kPieces && box * 8 + piece() >= kPieces) continue;
      const bool column = box * 64 + 64 <= kColumns || box * 64 + piece() * 8 < kColumns;
      copy_piece(target + box * kBoxBytes, source + box * 128, there && column);
    }
  }
};

// Starts to copy kRows rows from `row` on, of kColumns columns, by all kThreads threads of the CTA.
template <int kThreads, int kColumns, int kRows>
ATTNGEN_DEVICE void copy_rows(u32 tile, const HeadRows& from, int row) {
  using Share = RowShare<kThreads, kColumns, kRows>;
  const u32 target = tile + Share::place();
  const char* source = from.at(row + Share::row()) + Share::piece() * 16;
#pragma unroll
  for (int i = 0; i < kRows; i += Share::kRowsAtOnce) {
    Share::copy(target + i * 128, source + i * from.row_bytes, row + Share::row() + i < from.rows);
  }
}

}  // namespace attngen
