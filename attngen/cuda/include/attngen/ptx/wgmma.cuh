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

// Descriptor of an operand in 128-byte-swizzled shared memory: 8-row groups lie 1024 bytes apart;
// `leading_bytes` is the distance between 64-column boxes where the instruction spans several.
ATTNGEN_DEVICE u64 swizzled_descriptor(u32 address, u32 leading_bytes) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  constexpr u64 kGroupStride = static_cast<u64>(1024 >> 4) << 32;
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         kGroupStride | kSwizzle128;
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
