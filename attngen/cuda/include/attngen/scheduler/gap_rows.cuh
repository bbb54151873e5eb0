// Rows of a tensor that belong to no sequence: who fills which of them, and zeros.
#pragma once

#include "attngen/context.cuh"

namespace attngen {

// Each gap begins with another share, so that short ones do not all fall to the same.
constexpr u32 kTurn = 613;

// `visit(batch, row)` for each row of the tensor that belongs to no sequence and is in this one of
// so many shares. These divide the gaps: 32 sequences a chunk, and where there are more shares than
// chunks, several shares each of those.
template <class Sequence, class Visitor>
ATTNGEN_HD void for_each_gap_row(Sequence sequence, int sequences, u32 share, u32 shares,
                                 Visitor visit) {
  const u32 step = min_of((sequences + 32u) / 32, shares);
  const u32 rank = share / step;
  const u32 chunk = share - rank * step;
  const u32 sharers = (shares - 1 - chunk) / step + 1;
#pragma unroll 1
  for (u32 first = chunk * 32; first <= static_cast<u32>(sequences); first += step * 32) {
    // The first gap is that before all sequences.
#pragma unroll 1
    for (int batch = first - 1; batch < min_of(static_cast<int>(first) + 31, sequences); ++batch) {
      const Range gap = sequence.gap(batch, sequences);
#pragma unroll 1
      for (int row = gap.lo + (rank + (batch + 1) * kTurn) % sharers; row < gap.hi; row += sharers)
        visit(max_of(batch, 0), row);
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
    for (int i = 0; i < kBytes; i += kLanes * 16)
      *reinterpret_cast<uint4*>(at + i) = make_uint4(0, 0, 0, 0);
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
