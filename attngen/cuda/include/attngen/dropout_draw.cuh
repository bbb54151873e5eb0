// The dropout decisions of a warp's 16 rows of S, or of S^T, drawn without instructions that only
// some targets have.
#pragma once

#include "attngen/dropout_places.cuh"

namespace attngen {

template <int kN, bool kKeysAreRows>
ATTNGEN_DEVICE void draw_bits(DropBits<kN>& bits, const DropCalls<kKeysAreRows>& calls,
                              const DropThreshold& threshold) {
  u32 own[4];
  DropBits<kN>::decide(own, calls, threshold);
  const u32 passed = DropBits<kN>::template passed<kKeysAreRows>(own, calls.odd_row);
  bits.join(own, __shfl_xor_sync(~0u, passed, 4), calls, threshold);
}
// The same where the first row and column may stand anywhere.
template <int kN, bool kKeysAreRows>
ATTNGEN_DEVICE void draw_bits(DropBits<kN>& bits, const PlacedDropCalls<kKeysAreRows>& calls,
                              const DropThreshold& threshold) {
  if (calls.aligned) {
    draw_bits(bits, calls.whole, threshold);
  } else {
    decide_apart(bits, calls, threshold);
  }
}

}  // namespace attngen
