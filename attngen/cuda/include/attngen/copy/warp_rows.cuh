// Rows that the lanes of a warp copy into swizzled boxes of 128 bytes a row, as they lie behind
// each other or on pages.
#pragma once

#include "attngen/copy/cta_pages.cuh"
#include "attngen/copy/cta_rows.cuh"

namespace attngen {

// Whether there is a row at `position`: 0, or -1 where there is none.
ATTNGEN_DEVICE int page_of(const HeadRows& from, int position) {
  return position < from.rows ? 0 : -1;
}
ATTNGEN_DEVICE const char* row_at(const HeadRows& from, int position, int) {
  return from.at(position);
}
// The page that has the row at `position`, negative or too large where none has.
template <class Fetch>
ATTNGEN_DEVICE int page_of(const PagedRows<Fetch>& from, int position) {
  const int page = position < from.rows ? from.pages[from.fetch.place(position)] : -1;
  return page < from.count ? page : -1;
}
template <class Fetch>
ATTNGEN_DEVICE const char* row_at(const PagedRows<Fetch>& from, int position, int page) {
  const int within = position - from.fetch.place(position) * from.fetch.page_size;
  return from.first + page * from.page_bytes + within * from.row_bytes;
}

// How the lanes of a warp divide kRows rows of kRowBytes: eight neighbours copy the 16-byte pieces
// of a row's box, each the same piece of every box, of every fourth row. Boxes have kBoxRows rows.
template <int kRowBytes, int kRows, int kBoxRows = kRows>
struct WarpShare {
  static constexpr int kSteps = kRows / 4;
  static constexpr int kPieces = ceil_div(kRowBytes, 32) * 2;  // whole steps of a product
  static constexpr int kBoxes = ceil_div(kRowBytes, 128);
  static constexpr u32 kBoxBytes = kBoxRows * 128;
  static_assert(kRows % 4 == 0);

  // The pages of the lane's rows, of those from `row` on.
  template <class Rows>
  ATTNGEN_DEVICE static void find(int (&pages)[kSteps], const Rows& from, int row, int lane) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) pages[i] = page_of(from, row + i * 4 + lane / 8);
  }
  // Starts to copy the lane's pieces of rows from `row` on to those of the tile from `first` on, a
  // multiple of kRows; zeros of rows that are not there.
  template <class Rows>
  ATTNGEN_DEVICE static void copy(u32 tile, const int (&pages)[kSteps], const Rows& from, int row,
                                  int lane, int first = 0) {
    const int piece = lane % 8;
    const u32 place = lane / 8 * 128 + (piece ^ lane / 8) * 16;
    const int odd = kRows % 8 == 0 ? 0 : first / 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool there = pages[i] >= 0;
      const char* source = row_at(from, there ? row + i * 4 + lane / 8 : 0, there ? pages[i] : 0);
      const u32 target = tile + first * 128 + ((place ^ ((i + odd) % 2 * 64)) + i * 512);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (box * 8 + 8 > kPieces && box * 8 + piece >= kPieces) continue;
        const bool column = (box + 1) * 128 <= kRowBytes || box * 128 + piece * 16 < kRowBytes;
        copy_piece(target + box * kBoxBytes, source + box * 128 + piece * 16, there && column);
      }
    }
  }
};

}  // namespace attngen
