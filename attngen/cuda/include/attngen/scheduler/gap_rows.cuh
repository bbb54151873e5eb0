// Rows of a tensor that belong to no sequence: who fills which of them, and zeros.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

constexpr u32 kMostGapRows = (1u << 31) - 1;  // of 32 gaps

// `visit(batch, row)` by a whole warp for each row of the tensor that belongs to no sequence and is
// in this one of so many shares. These divide the gaps: 32 of them a chunk, a lane each, whose rows
// the shares of the chunk take in turn; where there are fewer shares, several chunks each.
template <class Sequence, class Visitor>
ATTNGEN_DEVICE void for_each_gap_row(Sequence sequence, int sequences, u32 share, u32 shares,
                                     int lane, Visitor visit) {
  const u32 step = min_of((sequences + 32u) / 32, shares);
  const u32 chunk = share % step;
#pragma unroll 1
  for (u32 first = chunk * 32; first <= static_cast<u32>(sequences); first += step * 32) {
    u32 end = 0;  // of the lane's rows among those of the chunk
    if (first + lane <= static_cast<u32>(sequences)) {
      // The first gap is before all sequences.
      const Range gap = sequence.gap(static_cast<int>(first) - 1 + lane, sequences);
      end = max_of(gap.hi - gap.lo, 0);
    }
    // Gaps that are in no order may be more rows than there are, even than an integer counts.
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end = min_of(end + before, kMostGapRows);
    }
    const u32 sharers = (shares - 1 - chunk) / step + 1;
#pragma unroll 1
    for (u32 at = share / step; at < __shfl_sync(~0u, end, 31); at += sharers) {
      const int owner = __ffs(__ballot_sync(~0u, at < end)) - 1;
      const int behind = __shfl_sync(~0u, end, owner) - at;
      const int before = static_cast<int>(first) - 1 + owner;
      visit(max_of(before, 0), sequence.gap_end(before, sequences) - behind);
    }
  }
}

// Zeros where all heads of a row are, kBytes each. Of few registers: loading warps have no more.
template <int kBytes>
ATTNGEN_DEVICE void clear_row(void* tensor, long long row_bytes, long long head_bytes, int heads,
                              int lane) {
  constexpr int kLanes = kBytes < 512 ? kBytes / 16 : 32;  // of a head
  constexpr int kHeads = 32 / kLanes;                      // at once
  int head = lane / kLanes;
  if (head >= kHeads) return;
  char* at = static_cast<char*>(tensor) + row_bytes + head * head_bytes + lane % kLanes * 16;
#pragma unroll 1
  for (; head < heads; head += kHeads, at += kHeads * head_bytes) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kLanes * 16) {
      const bool within = kBytes % (kLanes * 16) == 0 || lane % kLanes * 16 + i < kBytes;
      if (within) *reinterpret_cast<uint4*>(at + i) = make_uint4(0, 0, 0, 0);
    }
  }
}
// The same of heads that begin anywhere, `columns` elements each.
template <class Bits>
ATTNGEN_DEVICE void clear_elements(void* tensor, long long row, long long stride_head, int heads,
                                   int columns, int lane) {
#pragma unroll 1
  for (int i = lane; i < heads * columns; i += 32) {
    static_cast<Bits*>(tensor)[row + i / columns * stride_head + i % columns] = 0;
  }
}

}  // namespace attngen
