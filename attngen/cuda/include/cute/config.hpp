// Stands in for CUTLASS's configuration where its instruction wrappers are compiled: what these
// name, and no more, so that neither its own headers nor those of the C++ library come along.
#pragma once

#define CUTE_HOST_DEVICE __device__ __forceinline__
// A wrapper whose target lacks its instruction.
#define CUTE_INVALID_CONTROL_PATH(message) __trap()

namespace cute {

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

template <int kValue>
struct Int {};

struct alignas(16) uint128_t {
  uint64_t part[2];
};

// Addresses in shared memory are words that stand in the place of pointers (attngen/mma/atoms.cuh):
// nothing is converted.
template <class Pointee>
CUTE_HOST_DEVICE uint32_t cast_smem_ptr_to_uint(const Pointee* place) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(place));
}

}  // namespace cute
