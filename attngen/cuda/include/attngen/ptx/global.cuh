// Counters in global memory by which CTAs take turns, what is read there once, how a kernel waits
// for the one before it, and how large the chip is.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Whether the counter holds `value`; if so, what its writers did before is visible afterwards, to
// the copy engine too.
ATTNGEN_DEVICE bool has_count(const int* counter, int value) {
  int found;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return found == value;
}
// Blocks until it does.
ATTNGEN_DEVICE void await_count(const int* counter, int value) {
  while (!has_count(counter, value)) {
  }
}
// Blocks until it holds that or more; then as has_count.
ATTNGEN_DEVICE void await_reached(const int* counter, int value) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Takes the counter from 0 to 1; false where somebody has.
ATTNGEN_DEVICE bool claim(int* counter) {
  int found;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;"
               : "=r"(found)
               : "l"(counter)
               : "memory");
  return found == 0;
}
// Beyond any count, of at most 2^23 tiles of keys. A block's count of turns that holds as much says
// that its D and LSE are in memory.
constexpr int kReady = 1 << 24;
// Adds that, after everything that this thread did before.
ATTNGEN_DEVICE void make_ready(int* counter) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "n"(kReady) : "memory");
}
// Adds one, after everything that this thread did before.
ATTNGEN_DEVICE void count_up(int* counter) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// 16 bytes that are not read again soon: caches give their place away first, and keep what kernels
// before have written.
ATTNGEN_DEVICE uint4 load_once(const void* address) {
  uint4 x;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(address));
  return x;
}

// Programmatic dependent launch: once every CTA has called this or ended, the next kernel may
// start; it has to wait before it reads what this one writes.
ATTNGEN_DEVICE void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::); }
// Blocks until the kernel before has ended and what it wrote is visible.
ATTNGEN_DEVICE void await_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Places for multiprocessors, of which some may be empty.
ATTNGEN_DEVICE u32 multiprocessors() {
  u32 count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return count;
}

}  // namespace attngen
