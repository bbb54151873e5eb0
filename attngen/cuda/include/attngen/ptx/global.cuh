// Counters in global memory by which CTAs take turns.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Blocks until the counter holds `value`; what its writers did before is visible afterwards, to
// the copy engine too.
ATTNGEN_DEVICE void await_count(const int* counter, int value) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Adds one, after everything that this thread did before.
ATTNGEN_DEVICE void count_up(int* counter) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace attngen
