// Copies from global to shared memory that a thread starts and awaits itself.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// kBytes (4, 8 or 16) aligned bytes, or zeros where they are not `there`; past L1 unless kKeep. The
// instruction takes a number of bytes between, too, but a checker of memory counts all as read.
template <int kBytes, bool kKeep = false>
ATTNGEN_DEVICE void copy_async(u32 destination, const void* source, bool there) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what the instruction copies");
  const int present = there ? kBytes : 0;
  if constexpr (kBytes == 16 && kKeep) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "r"(present)
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
                 "l"(source), "r"(present)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(destination),
                 "l"(source), "n"(kBytes), "r"(present)
                 : "memory");
  }
}
// Waits until all copies that this thread started have arrived.
ATTNGEN_DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives at the mbarrier, as one of those it counts, once all copies of this thread have.
ATTNGEN_DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace attngen
