// The tensor memory accelerator: boxes of a 4-D tensor (column, row, head, batch) to and from
// shared memory.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Where lengths vary: the box is moved along a further dimension, in steps of which a row and a
// start are so many.
struct alignas(64) SequenceMap {
  TensorMap map;
  int row_units;
  int start_units;

  ATTNGEN_DEVICE int shift(SequenceIndex index) const {
    return index.length * row_units + index.start * start_units;
  }
};

// Pages, whose rows count in groups of 8.
struct alignas(64) PageMap {
  TensorMap map;
  int head_boxes;  // from a head to the next, where a copy brings all boxes of its columns; else 0
};

// L2 policies in the form that createpolicy returns for a whole-tensor fraction of 1.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictLast = 0x14F0000000000000ull;
constexpr u64 kEvictNormal = 0x1000000000000000ull;

ATTNGEN_DEVICE void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
ATTNGEN_DEVICE void tma_prefetch_map(const SequenceMap* map) { tma_prefetch_map(&map->map); }
ATTNGEN_DEVICE void tma_prefetch_map(const PageMap* map) { tma_prefetch_map(&map->map); }
ATTNGEN_DEVICE void tma_load(u32 destination, const TensorMap* map, u32 barrier, int column,
                             int row, int head, int batch, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}
ATTNGEN_DEVICE void tma_store(const TensorMap* map, u32 source, int column, int row, int head,
                              int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// Adds a box of 16-bit numbers in shared memory to those in global memory, rounding each sum.
ATTNGEN_DEVICE void tma_add(const TensorMap* map, u32 source, int column, int row, int head,
                            int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// The same of a sequence, from and to rows that belong to it.
ATTNGEN_DEVICE void tma_load(u32 destination, const SequenceMap* map, u32 barrier, int column,
                             int row, int head, SequenceIndex index, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(&map->map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(map->shift(index)),
      "r"(kLongest), "l"(policy)
      : "memory");
}
ATTNGEN_DEVICE void tma_store(const SequenceMap* map, u32 source, int column, int row, int head,
                              SequenceIndex index) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(&map->map),
      "r"(source), "r"(column), "r"(row), "r"(head), "r"(map->shift(index)), "r"(kLongest)
      : "memory");
}
// The same of a page: `head` counts boxes where a copy has several.
ATTNGEN_DEVICE void tma_load(u32 destination, const PageMap* map, u32 barrier, int column, int row,
                             int head, int page, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(&map->map), "r"(barrier), "r"(column), "r"(row & 7), "r"(head), "r"(row >> 3), "r"(page),
      "l"(policy)
      : "memory");
}
// `bytes` contiguous bytes (a multiple of 16, like both addresses) to shared memory.
ATTNGEN_DEVICE void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// Adds `bytes` contiguous bytes of floats in shared memory to those in global memory.
ATTNGEN_DEVICE void bulk_add(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination),
               "r"(source), "r"(bytes)
               : "memory");
}
// The same, stored.
ATTNGEN_DEVICE void bulk_store(float* destination, u32 source, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
ATTNGEN_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kPending committed stores of this thread have read their shared
// memory.
template <int kPending = 0>
ATTNGEN_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until every committed store of this thread is in memory.
ATTNGEN_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's shared-memory writes before later reads by the copy engine or wgmma.
ATTNGEN_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attngen
