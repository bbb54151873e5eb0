// Rows that the copy engine cannot read, since they do not begin at multiples of 16 bytes or their
// elements lie apart: a warp copies them into the same swizzled boxes.
#pragma once

#include "attngen/platform.cuh"

#if defined(__CUDACC__)
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#endif

namespace attngen {

// Rows of 16-bit elements of one head of one sequence. What lies at or beyond `rows` and `columns`
// counts as 0 and is not read.
struct GatheredRows {
  const char* first;
  long long row_bytes;
  long long column_bytes;
  int rows;
  int columns;

  // Bytes that may be copied at a time, by where rows begin; 2 where columns lie apart.
  ATTNGEN_HD int unit() const {
    const u64 place = reinterpret_cast<u64>(first) | static_cast<u64>(row_bytes);
    if (column_bytes != 2 || place % 4) return 2;
    return place % 16 == 0 ? 16 : place % 8 == 0 ? 8 : 4;
  }
};

// Those of sequence `batch` and head `head`, the first of which is row `token` of the batch's;
// strides are in elements.
ATTNGEN_HD GatheredRows gathered_rows(const void* tensor, long long batch, long long head,
                                      long long token, long long stride_batch,
                                      long long stride_head, long long stride_row,
                                      long long stride_column, int rows, int columns) {
  const long long start = batch * stride_batch + head * stride_head + token * stride_row;
  return {static_cast<const char*>(tensor) + 2 * start, 2 * stride_row, 2 * stride_column, rows,
          columns};
}

// How a warp divides a tile of kRows rows of kBytes: a lane copies kUnit bytes of a row at a time,
// kLanes lanes copy neighbours, kRowsAtOnce rows are copied at once.
template <int kUnit, int kBytes, int kRows>
struct GatherShare {
  static constexpr int kUnits = kBytes / kUnit;  // a row
  static constexpr int kLanes = kUnits > 16  ? 32
                                : kUnits > 8 ? 16
                                : kUnits > 4 ? 8
                                : kUnits > 2 ? 4
                                             : 2;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static_assert(kRows % 16 == 0 && kBytes % 32 == 0, "whole steps of a product");

  // Where byte `byte` of row `row` is in boxes of 128 bytes a row, box_bytes each, whose 16-byte
  // pieces are swizzled.
  ATTNGEN_HD static u32 offset(u32 box_bytes, int row, int byte) {
    const int piece = (byte / 16 ^ row) & 7;
    return byte / 128 * box_bytes + row * 128 + piece * 16 + byte % 16;
  }
};

#if defined(__CUDACC__)
// A unit of every kRowsAtOnce-th row, of which `present` bytes are there, element by element: a
// copy would read all of it.
template <int kUnit, int kBytes, int kRows>
ATTNGEN_DEVICE void gather_cut_unit(u32 tile, u32 box_bytes, const char* source,
                                    const GatheredRows& from, int within, int left, int byte,
                                    int present) {
  using Share = GatherShare<kUnit, kBytes, kRows>;
#pragma unroll 1
  for (int i = 0; i < kRows; i += Share::kRowsAtOnce) {
    const u32 target = tile + Share::offset(box_bytes, within + i, byte);
#pragma unroll 1
    for (int k = 0; k < kUnit; k += 2) {
      const bool there = i < left && k < present;
      store_shared_16(target + k, there ? *reinterpret_cast<const unsigned short*>(source + k) : 0);
    }
    source += Share::kRowsAtOnce * from.row_bytes;
  }
}
// Whether the lane has written something itself, which no copy's arrival tells of.
template <int kUnit, int kBytes, int kRows>
ATTNGEN_DEVICE bool gather_units(u32 tile, u32 box_bytes, const GatheredRows& from, int row,
                                 int lane) {
  using Share = GatherShare<kUnit, kBytes, kRows>;
  const int within = lane / Share::kLanes;
  bool stored = false;
#pragma unroll 1
  for (int unit = lane % Share::kLanes; unit < Share::kUnits; unit += Share::kLanes) {
    const int byte = unit * kUnit;
    const int present = from.columns * 2 - byte;
    const char* source = from.first + (row + within) * from.row_bytes + byte;
    const int left = from.rows - row - within;
    if (present > 0 && present < kUnit) {
      stored = true;
      gather_cut_unit<kUnit, kBytes, kRows>(tile, box_bytes, source, from, within, left, byte,
                                            present);
      continue;
    }
#pragma unroll 4
    for (int i = 0; i < kRows; i += Share::kRowsAtOnce) {
      const bool there = i < left && present > 0;
      copy_async<kUnit>(tile + Share::offset(box_bytes, within + i, byte), source, there);
      source += Share::kRowsAtOnce * from.row_bytes;
    }
  }
  return stored;
}
// Elements one by one, 8 of a row a lane.
template <int kBytes, int kRows>
ATTNGEN_DEVICE void gather_elements(u32 tile, u32 box_bytes, const GatheredRows& from, int row,
                                    int lane) {
  using Share = GatherShare<16, kBytes, kRows>;
  const int within = lane / Share::kLanes;
#pragma unroll 1
  for (int unit = lane % Share::kLanes; unit < Share::kUnits; unit += Share::kLanes) {
    const int left = from.rows - row - within;
    const char* source =
        from.first + (row + within) * from.row_bytes + unit * 8 * from.column_bytes;
#pragma unroll 1
    for (int i = 0; i < kRows; i += Share::kRowsAtOnce) {
      const int present = i < left ? from.columns - unit * 8 : 0;
      u32 words[4];
      const char* at = source;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const u32 element = k < present ? *reinterpret_cast<const unsigned short*>(at) : 0;
        words[k / 2] = k % 2 ? words[k / 2] | element << 16 : element;
        at += from.column_bytes;
      }
      store_shared_x4(tile + Share::offset(box_bytes, within + i, unit * 16), words);
      source += Share::kRowsAtOnce * from.row_bytes;
    }
  }
}

// Copies kRows rows from `row` on, of kColumns columns, by a whole warp. Each lane arrives at
// `barrier` once its part is there; whoever waits has to order these writes before what a product
// reads (fence_async_shared).
template <int kColumns, int kRows>
ATTNGEN_DEVICE void gather_tile(u32 tile, u32 box_bytes, const GatheredRows& from, int row,
                                u32 barrier, int lane) {
  lane = forget(lane);  // what follows from it is worked out anew: few registers could keep it
  const int unit = from.unit();
  bool stored = true;
  if (unit == 2) {
    gather_elements<kColumns * 2, kRows>(tile, box_bytes, from, row, lane);
  } else if (unit == 16) {
    stored = gather_units<16, kColumns * 2, kRows>(tile, box_bytes, from, row, lane);
  } else if (unit == 8) {
    stored = gather_units<8, kColumns * 2, kRows>(tile, box_bytes, from, row, lane);
  } else {
    stored = gather_units<4, kColumns * 2, kRows>(tile, box_bytes, from, row, lane);
  }
  if (!stored) return arrive_after_copies(barrier);
  await_copies();
  mbarrier_arrive(barrier);
}
#endif

}  // namespace attngen
