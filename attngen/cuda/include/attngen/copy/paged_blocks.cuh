// Blocks of keys that lie on pages: a warp copies one, its lanes a box each.
#pragma once

#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

// Where a lane's box of a block comes from, a page and its row there, and goes to, a row of the
// block (past its end: nowhere).
struct PagedBox {
  int page;
  int row;
  int within;
};

// Blocks of kBlock keys of one sequence, in shared memory as mma/gemm.cuh has tiles: groups of 8
// rows where boxes of kColumns make up a head's kHeadDim columns, so that one copy can bring a
// stretch of a page with all of them; else boxes, one after another, of which a copy brings one.
// What copies have in common is worked out for each block: a loading warp has few registers to keep
// it in.
template <int kBlock, int kHeadDim, class Fetch, int kColumns = 64>
struct PagedBlocks {
  static constexpr int kBoxes = ceil_div(kHeadDim, kColumns);
  static constexpr bool kGrouped = kHeadDim % kColumns == 0;
  static constexpr u32 kBoxBytes = kGrouped ? 1024 : kBlock * 128;
  static constexpr u32 kGroupBytes = kGrouped ? kBoxes * 1024 : 1024;

  Fetch fetch;
  const PageMap* map;
  int batch;
  int kv_len;
  int lane;

  // This lane's first copy of a block, for `load`: asked for before there is room for the block, so
  // that the copy waits for neither the table nor a division.
  ATTNGEN_DEVICE PagedBox find(int block) const {
    Fetch pages = fetch;
    pages.page_size = forget(pages.page_size);
    return locate(pages, block * kBlock, forget(lane));
  }

  // Copies block `block` of a head to `tile`; `full` is told how many bytes come. Keys past the
  // sequence's end are not copied, but for those that share a stretch with it.
  ATTNGEN_DEVICE void load(PagedBox box, u32 tile, u32 full, int head, int block, u64 policy) const {
    Fetch pages = fetch;
    pages.page_size = forget(pages.page_size);
    const int stretch = stretch_of(pages);
    if (lane == 0) {
      const int rows = (rows_of(block) + stretch - 1) & -stretch;
      mbarrier_arrive_expect(full, kBoxes * 128 * rows);
    }
    __syncwarp();
    if (box.within < kBlock) copy(box, lane, tile, full, head, policy);
    if (32 * stretch < copies() * kBlock) {  // pages of few rows
#pragma unroll 1
      for (u32 i = lane + 32; i / copies() * stretch < kBlock; i += 32) {
        box = locate(pages, block * kBlock, i);
        if (box.within < kBlock) copy(box, i, tile, full, head, policy);
      }
    }
    __syncwarp();
  }

  // Zeros behind the sequence's end, where values must not reach a product: 0 x NaN is NaN.
  ATTNGEN_DEVICE void clear_tail(u32 tile, int block) const {
    const u32 zero[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = rows_of(block) * 8 + lane; i < kBlock * 8; i += 32) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        store_shared_x4(tile + i / 64 * kGroupBytes + box * kBoxBytes + i % 64 * 16, zero);
      }
    }
    fence_async_shared();
    __syncwarp();
  }

  // Keys of a block that the sequence has.
  ATTNGEN_DEVICE int rows_of(int block) const {
    return min_of(max_of(kv_len - block * kBlock, 0), kBlock);
  }

 private:
  // Whether a copy brings all boxes of its rows.
  ATTNGEN_DEVICE bool joined() const { return kBoxes == 1 || map->head_boxes > 0; }
  // Those of a stretch.
  ATTNGEN_DEVICE int copies() const { return joined() ? 1 : kBoxes; }
  ATTNGEN_DEVICE int stretch_of(const Fetch& pages) const {
    const int stretch = pages.template stretch<kBlock>();
    return kGrouped && !joined() ? min_of(stretch, 8) : stretch;
  }
  ATTNGEN_DEVICE PagedBox locate(const Fetch& pages, int first, u32 i) const {
    const int within = i / copies() * stretch_of(pages);
    if (first < 0 || within >= min_of(kv_len - first, kBlock)) return {0, 0, kBlock};
    return {pages.batch_index(forget(batch), first + within), pages.row(first + within), within};
  }
  ATTNGEN_DEVICE void copy(const PagedBox& at, u32 i, u32 tile, u32 full, int head,
                           u64 policy) const {
    const u32 box = i % copies();
    const u32 to = tile + at.within / 8 * kGroupBytes + box * kBoxBytes + at.within % 8 * 128;
    const int place = map->head_boxes > 0 ? head * map->head_boxes : head;
    tma_load(to, map, full, box * kColumns, at.row, place, at.page, policy);
  }
};

}  // namespace attngen
