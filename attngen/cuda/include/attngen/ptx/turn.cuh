// A counter in global memory by which CTAs take turns, looked at without waiting.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Whether it holds the value or more; everything before whoever counted it up is there then, for
// the copy engine as well.
ATTNGEN_DEVICE bool has_reached(const int* counter, int value) {
  int found;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return found >= value;
}

}  // namespace attngen
