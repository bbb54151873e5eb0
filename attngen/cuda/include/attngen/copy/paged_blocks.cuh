// Blocks of keys that lie on pages: a warp copies one, its lanes a box each.
#pragma once

#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

// Where a lane's copy of a block comes from: a page, which need not exist (it reads as zeros then),
// and its row there, below 0 where the lane has nothing to copy.
struct PagedBox {
  int page;
  int row;
};

// Blocks of kBlock keys of one head of a sequence, in shared memory as mma/gemm.cuh has tiles:
// groups of 8 rows where boxes of kColumns make up a head's kHeadDim columns, so that one copy can
// bring a stretch of a page with all of them; else boxes, one after another, of which a copy brings
// one. A warp copies a block, its lanes a stretch each; what does not change from block to block
// they know.
template <int kBlock, int kHeadDim, class Fetch, int kColumns = 64>
class PagedBlocks {
 public:
  static constexpr int kBoxes = ceil_div(kHeadDim, kColumns);
  static constexpr bool kGrouped = kHeadDim % kColumns == 0;
  static constexpr u32 kBoxBytes = kGrouped ? 1024 : kBlock * 128;
  static constexpr u32 kGroupBytes = kGrouped ? kBoxes * 1024 : 1024;

  ATTNGEN_DEVICE PagedBlocks(const Fetch& fetch, const PageMap* map, int batch, int head,
                             int kv_len, int lane)
      : fetch_(fetch), map_(map), pages_(fetch.pages(batch)), kv_len_(kv_len), lane_(lane) {
    head_ = map->head_boxes > 0 ? head * map->head_boxes : head;
    within_ = within(lane);
    several_ = within(32) < kBlock;
  }

  // This lane's first copy of a block, for `load`: asked for before there is room for the block, so
  // that the copy does not wait for the table.
  ATTNGEN_DEVICE PagedBox find(int block) const { return find_at(block, within_); }

  // Copies block `block` to `tile`; `full` is told how many bytes come. Keys past the sequence's
  // end are not copied, but for those that share a stretch with it.
  ATTNGEN_DEVICE void load(const PagedBox& box, u32 tile, u32 full, int block, u64 policy) const {
    __syncwarp();  // all have seen that there is room: of no bytes, `full` moves on at once
    if (kBoxes == 1 ? within_ == 0 : lane_ == 0) {
      int rows = rows_of(block);
      if (rows < kBlock) rows = (rows + stretch() - 1) & -stretch();
      mbarrier_arrive_expect(full, kBoxes * 128 * rows);
    }
    __syncwarp();
    copy(box, lane_, within_, tile, full, policy);
    if (several_) {
#pragma unroll 1
      for (int i = lane() + 32; within(i) < kBlock; i += 32) {
        copy(find_at(block, within(i)), i, within(i), tile, full, policy);
      }
    }
    __syncwarp();
  }

  // Zeros behind the sequence's end, where values must not reach a product: 0 x NaN is NaN.
  ATTNGEN_DEVICE void clear_tail(u32 tile, int block) const {
    const u32 zero[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = rows_of(block) * 8 + lane(); i < kBlock * 8; i += 32) {
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
    return min_of(max_of(kv_len_ - block * kBlock, 0), kBlock);
  }

 private:
  // Kept, but where a head is one box: there it is found again when it is needed.
  ATTNGEN_DEVICE int lane() const { return kBoxes == 1 ? lane_id() : lane_; }

  // Rows of a copy, worked out anew: a loading warp has few registers to keep them in.
  ATTNGEN_DEVICE int stretch() const {
    Fetch pages = fetch_;
    pages.page_size = forget(pages.page_size);
    const int rows = pages.template stretch<kBlock>();
    return kGrouped && copies() > 1 ? min_of(rows, 8) : rows;
  }
  // Copies that bring as many rows of all columns.
  ATTNGEN_DEVICE int copies() const { return kBoxes == 1 || map_->head_boxes > 0 ? 1 : kBoxes; }
  // First row of copy `i`; past the block's end there is none.
  ATTNGEN_DEVICE int within(int i) const { return i / copies() * stretch(); }
  ATTNGEN_DEVICE PagedBox find_at(int block, int within) const {
    const int position = block * kBlock + within;
    const int place = fetch_.place(position);
    const bool there = within < kBlock && static_cast<u32>(position) < static_cast<u32>(kv_len_);
    return {there ? pages_[place] : 0, there ? position - place * fetch_.page_size : -1};
  }
  ATTNGEN_DEVICE void copy(const PagedBox& at, int i, u32 row, u32 tile, u32 full,
                           u64 policy) const {
    if (at.row < 0) return;
    const int box = i % copies();
    const u32 to = tile + row / 8 * kGroupBytes + row % 8 * 128 + box * kBoxBytes;
    tma_load(to, map_, full, box * kColumns, at.row, head_, at.page, policy);
  }

  Fetch fetch_;
  const PageMap* map_;
  const int* pages_;
  int kv_len_;
  int lane_;
  int head_;
  int within_;    // of the lane's first copy
  bool several_;  // copies a lane
};

}  // namespace attngen
