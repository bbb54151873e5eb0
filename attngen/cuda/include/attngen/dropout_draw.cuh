// The dropout decisions of a warp's 16 rows of S, drawn without instructions that only some targets
// have.
#pragma once

#include "attngen/dropout_places.cuh"

namespace attngen {

template <int kN>
ATTNGEN_DEVICE void draw_bits(DropBits<kN>& bits, const DropCalls<false>& calls,
                              const DropThreshold& threshold) {
  u32 own[4];
  DropBits<kN>::template decide<false>(own, calls, threshold);
  const u32 passed = DropBits<kN>::template passed<false>(own, calls.odd_row);
  bits.template join<false>(own, __shfl_xor_sync(~0u, passed, 4), calls, threshold);
}
// The same where the first row and column may stand anywhere.
template <int kN>
ATTNGEN_DEVICE void draw_bits(DropBits<kN>& bits, const PlacedDropCalls<false>& calls,
                              const DropThreshold& threshold) {
  if (calls.aligned) {
    draw_bits(bits, calls.whole, threshold);
  } else {
    decide_apart(bits, calls, threshold);
  }
}

}  // namespace attngen
