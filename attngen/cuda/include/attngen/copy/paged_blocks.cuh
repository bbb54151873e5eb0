// Blocks of keys that lie on pages: a warp copies one, its lanes a box each.
#pragma once

#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

// Where a lane's box of a block comes from, a page and its row there, and goes to, a row of the
// block (past its end: nowhere); and the bytes of all boxes.
struct PagedBox {
  int page;
  int row;
  int within;
  u32 bytes;
};

// Blocks of kBlock keys of one sequence, of kBoxes boxes side by side: each has 64 columns by a
// stretch of one page. What boxes have in common is worked out for each block: a loading warp has
// few registers to keep it in.
template <int kBlock, int kBoxes, class Fetch>
struct PagedBlocks {
  Fetch fetch;
  int batch;
  int kv_len;
  int lane;

  // This lane's first box of a block, for `load`: asked for before there is room for the block, so
  // that the copy waits for neither the table nor a division.
  ATTNGEN_DEVICE PagedBox find(int block) const {
    Fetch pages = fetch;
    pages.page_size = forget(pages.page_size);
    return locate(pages, block * kBlock, forget(lane));
  }

  // Copies block `block` of a head to `tile`; `full` is told how many bytes come. Keys past the
  // sequence's end are not copied, but for those that share a stretch with it.
  ATTNGEN_DEVICE void load(PagedBox box, const TensorMap* map, u32 tile, u32 full, int head,
                           int block, u64 policy) const {
    if (lane == 0) mbarrier_arrive_expect(full, box.bytes);
    __syncwarp();
    if (box.within < kBlock) copy(box, lane, map, tile, full, head, policy);
    Fetch pages = fetch;
    pages.page_size = forget(pages.page_size);
    const int stretch = pages.template stretch<kBlock>();
    if (32 * stretch < kBoxes * kBlock) {  // pages of few rows
#pragma unroll 1
      for (u32 i = lane + 32; i / kBoxes * stretch < kBlock; i += 32) {
        box = locate(pages, block * kBlock, i);
        if (box.within < kBlock) copy(box, i, map, tile, full, head, policy);
      }
    }
    __syncwarp();
  }

 private:
  ATTNGEN_DEVICE PagedBox locate(const Fetch& pages, int first, u32 i) const {
    const int stretch = pages.template stretch<kBlock>();
    const int rows = min_of(max_of(kv_len - first, 0), kBlock);
    const int within = i / kBoxes * stretch;
    const u32 bytes = kBoxes * 128 * ((rows + stretch - 1) & -stretch);
    if (first < 0 || within >= rows) return {0, 0, kBlock, bytes};
    return {pages.batch_index(batch, first + within), pages.row(first + within), within, bytes};
  }
  ATTNGEN_DEVICE static void copy(const PagedBox& box, u32 i, const TensorMap* map, u32 tile,
                                  u32 full, int head, u64 policy) {
    tma_load(tile + i % kBoxes * (kBlock * 128) + box.within * 128, map, full, i % kBoxes * 64,
             box.row, head, box.page, policy);
  }
};

}  // namespace attngen
