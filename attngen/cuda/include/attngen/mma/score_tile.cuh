// One warp's part of a tile [i, j] of a 16-bit tensor that a score reads: copied into shared memory
// while the block before it is worked on, and from there into the layout of an accumulator.
#pragma once

#include "attngen/platform.cuh"

#if defined(__CUDACC__)
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/matrix_move.cuh"
#endif

namespace attngen {

// One head of one sequence of the tensor. Strides are in elements; what lies at or beyond `rows`
// and `columns` counts as 0 and is not read.
struct TileSource {
  const unsigned short* first;
  long long stride_row;
  long long stride_column;
  int rows;
  int columns;

  // Bytes that may be copied at a time, by where rows begin; 2 where columns lie apart.
  ATTNGEN_HD int unit() const {
    if (stride_column != 1) return 2;
    const long long place = reinterpret_cast<long long>(first) | stride_row * 2;
    return place % 16 == 0 ? 16 : place % 4 == 0 ? 4 : 2;
  }
};

// kRows rows of kColumns elements in shared memory, in chunks of 16 bytes that lie so that eight of
// neighbouring rows, and the chunks of a row, are in banks of their own.
template <int kRows, int kColumns>
struct TileStage {
  static constexpr int kChunks = kColumns / 8;
  static constexpr bool kSwizzled = kChunks % 8 == 0 || kChunks == 2;
  static constexpr int kPitch = kSwizzled ? kChunks : kChunks | 1;  // chunks from row to row
  static constexpr u32 kBytes = kRows * kPitch * 16;
  // Lanes that copy a row's chunks, and rows copied at once.
  static constexpr int kLanes = kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : 2;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kColumns % 16 == 0 && kChunks <= 16 && kRows % 16 == 0, "whole matrices");

  u32 place;  // in shared memory

  ATTNGEN_HD static constexpr u32 offset(int row, int chunk) {
    const int turned = !kSwizzled     ? chunk
                       : kChunks == 2 ? chunk ^ (row >> 2 & 1)
                                      : chunk ^ (row & 7);
    return (row * kPitch + turned) * 16;
  }

#if defined(__CUDACC__)
  // Starts to copy what begins at [row, column]; all lanes have taken what lay here.
  ATTNGEN_DEVICE void fetch(const TileSource& from, int row, int column, int lane) const {
    const int chunk = lane % kLanes;
    const int present = min_of(max_of(from.columns - column - chunk * 8, 0), 8);
    const int within = lane / kLanes;
    const unsigned short* source =
        from.first + (row + within) * from.stride_row + (column + chunk * 8) * from.stride_column;
    const int unit = from.unit();
    if (kChunks != kLanes && chunk >= kChunks) return;
    if (unit == 16 && from.stride_row == 0) {
      // All multiprocessors would ask L2 for the same few lines again and again.
#pragma unroll
      for (int i = 0; i < kRows; i += kRowsAtOnce) {
        copy_async<16, true>(place + offset(within + i, chunk), present > 0 ? source : from.first,
                             present * 2);
      }
    } else if (unit == 16) {
#pragma unroll
      for (int i = 0; i < kRows; i += kRowsAtOnce) {
        const int count = row + within + i < from.rows ? present : 0;
        copy_async<16>(place + offset(within + i, chunk), count > 0 ? source : from.first,
                       count * 2);
        source += kRowsAtOnce * from.stride_row;
      }
    } else {
      copy_slowly(from, source, row + within, within, chunk, present, unit);
    }
  }

  // The fragment of kRows = 16 rows: a word has two columns of a row, in an accumulator's order.
  template <int kCount>
  ATTNGEN_DEVICE void take(u32* words, int group, int lane) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int chunk = 2 * (group + i) + (lane >> 4);
      load_matrix_x4(words + 4 * i, place + offset(lane & 15, chunk));
    }
  }
  // The fragment of the transposed tile, whose 16 rows are the kColumns = 16 columns: four words,
  // those of rows 16 group to 16 group + 15.
  ATTNGEN_DEVICE void take_transposed(u32* words, int group, int lane) const {
    const int row = 16 * group + (lane >> 4) * 8 + (lane & 7);
    load_matrix_transposed_x4(words, place + offset(row, lane >> 3 & 1));
  }

 private:
  // Rows that begin anywhere, or columns that lie apart: two elements at a time, or one.
  ATTNGEN_DEVICE void copy_slowly(TileSource from, const unsigned short* source, int row,
                                  int within, int chunk, int present, int unit) const {
#pragma unroll 1
    for (int i = 0; i < kRows; i += kRowsAtOnce, source += kRowsAtOnce * from.stride_row) {
      const int count = row + i < from.rows ? present : 0;
      const u32 target = place + offset(within + i, chunk);
      if (unit == 4) {
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const int some = min_of(max_of(count - k, 0), 2);
          copy_async<4>(target + k * 2, some > 0 ? source + k : from.first, some * 2);
        }
      } else {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          const u32 low = k < count ? source[k * from.stride_column] : 0;
          const u32 high = k + 1 < count ? source[(k + 1) * from.stride_column] : 0;
          words[k / 2] = low | high << 16;
        }
        store_shared_x4(target, words);
      }
    }
  }
#endif
};

}  // namespace attngen
