// Two CTAs that are a cluster: copies to both, and each other's barriers.
#pragma once

#include "attngen/ptx/tma.cuh"

namespace attngen {

// Which of the two a CTA is; neighbours along the grid's first axis are a cluster.
ATTNGEN_DEVICE int cluster_rank() { return static_cast<int>(blockIdx.x & 1); }
// Awaits all threads of both that have not ended.
ATTNGEN_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at a barrier of the CTA `rank`, whose address in its own shared memory is `barrier`. The
// arrival tells that products have read what they were awaited for, and of no writes: one that
// releases at the cluster's scope compiles to a fence of all memory. It overtakes a thread's own
// loads.
ATTNGEN_DEVICE void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Arrives likewise, by a warp's first lane, but not before `loaded`, which depends on what has been
// read, is known: the address depends on it, by its bits that the lane's number has, none.
ATTNGEN_DEVICE void mbarrier_arrive_at_after(u32 loaded, u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there, none;\n"
      "mov.u32 none, %%laneid;\n"
      "and.b32 none, none, %0;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "add.u32 there, there, none;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(loaded),
      "r"(barrier), "r"(rank)
      : "memory");
}
// A place of the CTA `rank`, whose address in its own shared memory is `address`, as the cluster
// knows it.
ATTNGEN_DEVICE u32 place_of(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Sends four numbers to a place of either CTA, whose barrier, also such a place, counts 16 bytes.
ATTNGEN_DEVICE void send(u32 place, const float* x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(place),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}
// One number of 4 bytes.
ATTNGEN_DEVICE void send(u32 place, u32 x, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(place),
      "r"(x), "r"(barrier)
      : "memory");
}
// A box to the same place of both, each of which is told at its own barrier.
ATTNGEN_DEVICE void tma_load_both(u32 destination, const TensorMap* map, u32 barrier, int column,
                                  int row, int head, int batch, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch),
      "h"(static_cast<unsigned short>(3)), "l"(policy)
      : "memory");
}
ATTNGEN_DEVICE void tma_load_both(u32 destination, const SequenceMap* map, u32 barrier, int column,
                                  int row, int head, SequenceIndex index, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
          destination),
      "l"(&map->map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(map->shift(index)),
      "r"(kLongest), "h"(static_cast<unsigned short>(3)), "l"(policy)
      : "memory");
}

}  // namespace attngen
