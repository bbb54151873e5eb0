// What a warp or a warpgroup needs of a tile [i, j] of a 16-bit tensor that a score reads: brought
// into shared memory by the copy engine or, what that cannot read, by threads, and taken from there
// in the layout of an accumulator.
#pragma once

#include "attngen/platform.cuh"

#if defined(__CUDACC__)
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"
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

// kRows rows of kColumns elements in shared memory, as the copy engine leaves boxes of 64 columns,
// or one of 16, swizzled by their width: eight chunks of 16 bytes of neighbouring rows are in banks
// of their own.
template <int kRows, int kColumns>
struct TileStage {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kBoxes = ceil_div(kColumns, 64);
  static constexpr int kBoxChunks = kChunks == 2 ? 2 : 8;
  static constexpr u32 kBoxBytes = kRows * kBoxChunks * 16;
  static constexpr u32 kBytes = kBoxes * kBoxBytes;
  // Lanes that copy a row's chunks, and rows copied at once.
  static constexpr int kLanes = kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : 2;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kColumns % 16 == 0 && kChunks <= 16 && kRows % 16 == 0, "whole matrices");

  u32 place;  // in shared memory

  ATTNGEN_HD static constexpr u32 offset(int row, int chunk) {
    const int turned = kChunks == 2 ? chunk ^ (row >> 2 & 1) : (chunk ^ row) & 7;
    return chunk / kBoxChunks * kBoxBytes + (row * kBoxChunks + turned) * 16;
  }

#if defined(__CUDACC__)
  // The copy engine brings what begins at [row, column], for one thread to ask: kBytes.
  ATTNGEN_DEVICE void load(const TensorMap* map, u32 full, int row, int column, int head,
                           int batch) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      tma_load(place + box * kBoxBytes, map, full, column + box * 64, row, head, batch,
               kEvictNormal);
    }
  }
  // What the copy engine cannot read, or one row for all, by a warp's lanes: kCount chunks of each
  // row, from `first` on.
  template <int kCount = kChunks>
  ATTNGEN_DEVICE void copy(const TileSource& from, int row, int column, int lane,
                           int first = 0) const {
#pragma unroll 1
    for (int i = lane; i < (from.stride_row == 0 ? 1 : kRows) * kCount; i += 32) {
      const int at = column + i % kCount * 8;
      const bool inside = row + i / kCount < from.rows;
      const int count = inside ? min_of(max_of(from.columns - at, 0), 8) : 0;
      copy_chunk(from, (row + i / kCount) * from.stride_row + at * from.stride_column, count,
                 place + offset(i / kCount, first + i % kCount));
    }
  }
  // What the copy engine cannot read, or one row for all, by a warp: `count` rows, two columns a
  // lane at a time. Each lane arrives at `full` once its part is there.
  ATTNGEN_DEVICE void gather(const TileSource& from, int row, int column, int count, u32 full,
                             int lane) const {
    static_assert(kBoxChunks == 8, "swizzled by 128 bytes");
    const bool in_pairs = from.unit() > 2;
    const unsigned short* source =
        from.first + row * from.stride_row + (column + lane * 2) * from.stride_column;
    const int columns = from.columns - column - lane * 2;
    bool stored = false;
#pragma unroll 1
    for (int i = 0; i < count; ++i, source += from.stride_row) {
      const int present = row + i < from.rows ? columns : 0;
#pragma unroll
      for (int at = 0; at < kColumns; at += 64) {
        if (at + lane * 2 >= kColumns) continue;
        const u32 target = place + offset(i, at / 8 + lane / 4) + lane % 4 * 4;
        const int some = min_of(max_of(present - at, 0), 2);
        if (in_pairs && some != 1) {
          copy_async<4>(target, source + at, some > 0);
        } else {
          stored = true;
          const unsigned short* pair = source + at * from.stride_column;
          store_shared_16(target, some > 0 ? pair[0] : 0);
          store_shared_16(target + 2, some > 1 ? pair[from.stride_column] : 0);
        }
      }
    }
    if (!stored) return arrive_after_copies(full);
    await_copies();
    mbarrier_arrive(full);
  }
  // Starts to copy what begins at [row, column]; all lanes have taken what lay here. Where columns
  // end within a chunk, no copy of a whole one may read it.
  ATTNGEN_DEVICE void fetch(const TileSource& from, int row, int column, int lane) const {
    const int chunk = lane % kLanes;
    const bool present = column + chunk * 8 < from.columns;
    const int within = lane / kLanes;
    const unsigned short* source =
        from.first + (row + within) * from.stride_row + (column + chunk * 8) * from.stride_column;
    const bool is_cut = from.columns % 8 != 0 && column + kColumns > from.columns;
    if (from.unit() < 16 || from.stride_row == 0 || is_cut) return copy(from, row, column, lane);
    if (kChunks != kLanes && chunk >= kChunks) return;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const bool there = present && row + within + i < from.rows;
      copy_async<16>(place + offset(within + i, chunk), there ? source : from.first, there);
      source += kRowsAtOnce * from.stride_row;
    }
  }

  // The fragment of 16 rows, of kCount times 16 columns from 16 `group` on: a word has two columns
  // of a row, in an accumulator's order. within: the lane's row, or that which all have.
  template <int kCount>
  ATTNGEN_DEVICE void take(u32* words, int group, int within, int lane) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int chunk = 2 * (group + i) + (lane >> 4);
      load_matrix_x4(words + 4 * i, place + offset(within, chunk));
    }
  }
  // The fragment of the transposed tile, whose 16 rows are columns of two chunks from `chunk` on:
  // four words of 16 columns, which are rows; within: the lane's, or that which all have.
  ATTNGEN_DEVICE void take_transposed(u32* words, int within, int chunk, int lane) const {
    load_matrix_transposed_x4(words, place + offset(within, chunk + (lane >> 3 & 1)));
  }

 private:
  // As many elements at a time as where rows begin, and how many there are, allow. Multiprocessors
  // keep one row for all: L2 would be asked for the same few lines again and again.
  ATTNGEN_DEVICE static void copy_chunk(const TileSource& from, long long start, int count,
                                        u32 target) {
    const unsigned short* source = from.first + start;
    const int unit = from.unit();
    if (unit == 16 && count % 8 == 0) {
      copy_async<16, true>(target, count > 0 ? source : from.first, count > 0);
      return;
    }
    if (unit >= 4 && count % 2 == 0) {
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        copy_async<4>(target + k * 2, k < count ? source + k : from.first, k < count);
      }
      return;
    }
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const u32 low = k < count ? source[k * from.stride_column] : 0;
      const u32 high = k + 1 < count ? source[(k + 1) * from.stride_column] : 0;
      words[k / 2] = low | high << 16;
    }
    store_shared_x4(target, words);
  }
#endif
};

}  // namespace attngen
