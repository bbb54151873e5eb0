// mbarriers in shared memory, and named barriers among warps.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

ATTNGEN_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised mbarriers visible to the copy engine; a __syncthreads must follow.
ATTNGEN_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
ATTNGEN_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// As `count` threads.
ATTNGEN_DEVICE void mbarrier_arrive(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
// Arrives and announces `bytes` that the copy engine will deliver before the phase completes.
ATTNGEN_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Blocks until the phase of the given parity has completed.
ATTNGEN_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers 1..15 (0 is __syncthreads): `threads` of them, arriving or waiting, complete one.
ATTNGEN_DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
ATTNGEN_DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same as a sync, and whether `condition` holds in all threads.
ATTNGEN_DEVICE bool named_barrier_all(u32 id, u32 threads, bool condition) {
  u32 all;
  asm volatile(
      "{\n.reg .pred mine, every;\nsetp.ne.u32 mine, %3, 0;\n"
      "bar.red.and.pred every, %1, %2, mine;\nselp.u32 %0, 1, 0, every;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(condition))
      : "memory");
  return __shfl_sync(~0u, all, 0) != 0;  // so the compiler knows it to be the same in a warp
}

// Position in a ring of `kStages` buffers, or as many of them as are used, and the parity that
// tells one lap from the next.
template <int kStages>
struct RingPosition {
  u32 stage = 0;
  u32 parity = 0;

  ATTNGEN_DEVICE void advance(u32 used = kStages) {
    if (++stage == used) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace attngen
