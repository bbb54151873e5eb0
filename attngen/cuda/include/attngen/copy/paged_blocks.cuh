// Blocks of keys that lie on pages: a warp copies one, its lanes a box each.
#pragma once

#include "attngen/ptx/barrier.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

// Those of one sequence, of kBlock keys. A box has 64 columns by a stretch of one page. What boxes
// have in common is worked out for each block: a loading warp has few registers to keep it in.
template <int kBlock, class Fetch>
struct PagedBlocks {
  static constexpr u32 kBoxBytes = kBlock * 128;

  Fetch fetch;
  int batch;
  int kv_len;
  int lane;

  // The page of stretch `lane` of a block, for `load`; what lies outside the sequence has none.
  ATTNGEN_DEVICE int find_page(int block) const {
    const int lane = forget(this->lane);
    Fetch fetch = this->fetch;
    fetch.page_size = forget(fetch.page_size);
    const int within = lane * fetch.template stretch<kBlock>();
    const int position = block * kBlock + within;
    const bool inside = within < kBlock && position >= 0 && position < kv_len;
    return inside ? fetch.batch_index(batch, position) : 0;
  }

  // Copies block `block` of a head to `tile`; `full` is told how many bytes come. Keys past the
  // sequence's end are not copied, or those that share a stretch with it.
  template <int kBoxes>
  ATTNGEN_DEVICE void load(int page, const TensorMap* map, u32 tile, u32 full, int head, int block,
                           u64 policy) const {
    const int lane = forget(this->lane);
    Fetch fetch = this->fetch;
    fetch.page_size = forget(fetch.page_size);
    const int first = block * kBlock;
    const int stretch = fetch.template stretch<kBlock>();
    const int boxes = kBoxes * ceil_div(min_of(max_of(kv_len - first, 0), kBlock), stretch);
    if (lane == 0) mbarrier_arrive_expect(full, boxes * stretch * 128);
    __syncwarp();
#pragma unroll 1
    for (int base = 0; base < boxes; base += 32) {
      const u32 i = base + lane;
      const u32 within = i / kBoxes * stretch;
      int from = __shfl_sync(~0u, page, i / kBoxes);  // of 32 lanes
      if (i >= boxes) continue;
      if (i >= 32 * kBoxes) from = fetch.batch_index(batch, first + within);  // very small pages
      tma_load(tile + i % kBoxes * kBoxBytes + within * 128, map, full, i % kBoxes * 64,
               fetch.row(first + within), head, from, policy);
    }
  }
};

}  // namespace attngen
