// Counters in global memory by which CTAs take turns, and how a kernel waits for the one before it.
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

// Programmatic dependent launch: once every CTA has called this or ended, the next kernel may
// start; it has to wait before it reads what this one writes.
ATTNGEN_DEVICE void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::); }
// Blocks until the kernel before has ended and what it wrote is visible.
ATTNGEN_DEVICE void await_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace attngen
