// The SM's clock.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

ATTNGEN_DEVICE u32 clock_cycles() {
  u32 cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
  return cycles;
}
// Lets so many pass.
ATTNGEN_DEVICE void wait_cycles(int cycles) {
  const u32 start = clock_cycles();
  while (static_cast<int>(clock_cycles() - start) < cycles) {
  }
}

}  // namespace attngen
