// Products of one warp by mma.sync, of operands in 128-byte-swizzled boxes of 64 columns, one after
// another: kTiles times 16 rows by columns in steps of 16. A lane is told where it begins to read.
#pragma once

#include "attngen/mma/atoms.cuh"
#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// Where a lane reads an operand of the left (A) or, transposed, one of the right whose rows are the
// reduction (B of A B), and where one whose rows are columns of the product (B of A B^T), or a
// transposed left one (A of A^T B): `row` is the first, a multiple of 8, `chunk` the first 16
// bytes.
ATTNGEN_DEVICE u32 lane_place(u32 tile, int row, int chunk, int lane) {
  return tile + (row + (lane & 15)) * 128 + (((chunk + (lane >> 4)) ^ lane) & 7) * 16;
}
ATTNGEN_DEVICE u32 lane_place_across(u32 tile, int row, int chunk, int lane) {
  const int within = (lane & 7) + (lane >> 4) * 8;
  return tile + (row + within) * 128 + (((chunk + (lane >> 3 & 1)) ^ lane) & 7) * 16;
}
// The place `step` steps of 16 columns further, of boxes of kBoxBytes.
template <u32 kBoxBytes>
ATTNGEN_DEVICE u32 step_place(u32 place, int step) {
  return (place ^ (step % 4 * 32)) + step / 4 * kBoxBytes;
}

// acc += A B^T, both with the reduction along their rows, in kSteps steps. kA: how far A lies from
// where a_place says, so that operands of one shape share what lanes keep of places.
template <class Element, int kSteps, u32 kA, u32 kABoxBytes, u32 kBBoxBytes, int kTiles, int kHalf>
ATTNGEN_DEVICE void multiply_rows(float (&acc)[kTiles][kHalf], u32 a_place, u32 b_place) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      load_matrices(a[m], step_place<kABoxBytes>(a_place, step) + kA + m * (16 * 128));
    }
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
      u32 b[4];
      load_matrices(b, step_place<kBBoxBytes>(b_place, step) + n * (16 * 128));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply_add<Element>(acc[m] + n * 8, a[m], b[0], b[1]);
        multiply_add<Element>(acc[m] + n * 8 + 4, a[m], b[2], b[3]);
      }
    }
  }
}

// The steps of 16 columns, of kSteps, that one of kSharers warps has: kMost from `first` on, of
// which the last warps may lack some.
template <int kSteps, int kSharers>
struct ColumnShare {
  static constexpr int kMost = ceil_div(kSteps, kSharers);
  static constexpr bool kWhole = kSteps % kSharers == 0;
  int first;

  ATTNGEN_DEVICE explicit ColumnShare(int sharer) : first(sharer * kMost) {}
  ATTNGEN_DEVICE bool has(int n) const { return kWhole || first + n < kSteps; }
  // Where a lane reads them, from where it would read the first of all.
  template <u32 kBoxBytes>
  ATTNGEN_DEVICE u32 begin(u32 place) const {
    return kMost % 4 == 0 || 4 % kMost == 0 ? step_place<kBoxBytes>(place, first) : place;
  }
  template <u32 kBoxBytes>
  ATTNGEN_DEVICE u32 place(u32 begin, int n) const {
    return step_place<kBoxBytes>(begin, kMost % 4 == 0 || 4 % kMost == 0 ? n : first + n);
  }
};

// Adds step `k` of a reduction, 16 of it: `a`, times the columns of B that the warp has.
template <class Element, u32 kBBoxBytes, int kTiles, class Share>
ATTNGEN_DEVICE void multiply_step(float (&acc)[kTiles][Share::kMost * 8], const u32 (&a)[kTiles][4],
                                  u32 b_begin, int k, const Share& share) {
#pragma unroll
  for (int n = 0; n < Share::kMost; ++n) {
    if (!share.has(n)) continue;
    u32 b[4];
    load_matrices_transposed(b, share.template place<kBBoxBytes>(b_begin, n) + k * (16 * 128));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      multiply_add<Element>(acc[m] + n * 8, a[m], b[0], b[1]);
      multiply_add<Element>(acc[m] + n * 8 + 4, a[m], b[2], b[3]);
    }
  }
}

// acc += A B, of the columns of B that the warp has: A has the reduction along its rows, kTiles
// times 16 of them, in kSteps steps of 16; or, kTransposed, across them. kA: as above.
template <class Element, int kSteps, u32 kA, u32 kBBoxBytes, bool kTransposed, int kTiles,
          class Share>
ATTNGEN_DEVICE void multiply_columns(float (&acc)[kTiles][Share::kMost * 8], u32 a_place,
                                     u32 b_begin, const Share& share) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (kTransposed) {
        load_matrices_transposed(a[m], (a_place ^ (m * 32)) + kA + k * (16 * 128));
      } else {
        load_matrices(a[m], (a_place ^ (k * 32)) + kA + m * (16 * 128));
      }
    }
    multiply_step<Element, kBBoxBytes>(acc, a, b_begin, k, share);
  }
}

// As multiply_columns, of an A that is in registers: accumulators, packed, whose columns are the
// reduction.
template <class Element, int kSteps, u32 kBBoxBytes, int kTiles, class Share>
ATTNGEN_DEVICE void multiply_held(float (&acc)[kTiles][Share::kMost * 8],
                                  const u32 (&a)[kTiles][kSteps * 4], u32 b_begin,
                                  const Share& share) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 step[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) step[m][i] = a[m][k * 4 + i];
    }
    multiply_step<Element, kBBoxBytes>(acc, step, b_begin, k, share);
  }
}

// Where the first pair of a thread's accumulator of 16 rows goes in a box of 128-byte rows, and all
// of them to there.
ATTNGEN_DEVICE u32 pair_place(u32 box, int row, int chunk, int lane) {
  return box + (row + lane / 4) * 128 + ((chunk ^ (lane >> 2)) & 7) * 16 + (lane & 3) * 4;
}
template <int kPairs>
ATTNGEN_DEVICE void store_pairs(u32 place, const u32 (&packed)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    store_shared((place ^ (i / 2 * 16)) + i % 2 * 8 * 128, __uint_as_float(packed[i]));
  }
}

}  // namespace attngen
