// Warpgroup matrix multiply: ordering, operand descriptors, register hand-over.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTNGEN_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are still running.
template <int kPending>
ATTNGEN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point.
template <int kN>
ATTNGEN_DEVICE void settle(float (&acc)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// The compiler likes to sink arithmetic below a wait for a product, under which it could run. What
// a thread does next, though it hardly ever does it, depends on x: it lets kernels that wait for
// this one by themselves be launched, a predicated instruction and no branch.
ATTNGEN_DEVICE void finish_first(u32 x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x9E3779B9;\n"
      "@p griddepcontrol.launch_dependents;\n}" ::"r"(x)
      : "memory");
}

// Where an operand lies in 128-byte-swizzled shared memory, as the low word of its descriptor:
// stepping through the operand adds to it, in units of 16 bytes. `leading_bytes` is the distance
// between 64-column boxes where one instruction spans several.
ATTNGEN_DEVICE u32 operand_base(u32 address, u32 leading_bytes) {
  return (address & 0x3FFFF) >> 4 | (leading_bytes >> 4) << 16;
}
// The high word: groups of 8 rows lie so many bytes apart.
ATTNGEN_DEVICE constexpr u32 descriptor_high(u32 group_bytes) {
  constexpr u32 kSwizzle128 = 1u << 30;
  return kSwizzle128 | group_bytes >> 4;
}

// setmaxnreg: a warpgroup gives registers back to its CTA, or takes them.
template <int kRegisters>
ATTNGEN_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ATTNGEN_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace attngen
