// What is read from memory later, asked for now.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Brings so many bytes to L2. Both are multiples of 16.
ATTNGEN_DEVICE void prefetch_to_l2(const void* address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

}  // namespace attngen
