// Turns of CTAs at what they add to in memory by their own threads, without the copy engine.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Blocks each thread until the counter holds `value` or more; what was added before is there then.
ATTNGEN_DEVICE void await_turn(const int* counter, int value) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < value);
}
// Adds one, after everything that this thread, and those it has met at a barrier, did before.
ATTNGEN_DEVICE void pass_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace attngen
