// The one rule by which kernels take lengths and places that stand in memory, whatever these say:
// nothing outside a tensor is ever a sequence's.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Rows [start, start + length) of a tensor.
struct Span {
  int start;
  int length;
};

// What two numbers differ by; those that differ by 2^31 or more count as if in the wrong order.
ATTNGEN_HD int difference(int end, int begin) {
  return static_cast<int>(static_cast<u32>(end) - static_cast<u32>(begin));
}

// Whether a tensor of `rows` rows has all of the span, which is of `longest` rows at most.
ATTNGEN_HD bool lies_within(Span span, int rows, int longest) {
  const u32 room = static_cast<u32>(rows) - static_cast<u32>(span.start);
  return static_cast<u32>(span.start) <= static_cast<u32>(rows) &&
         static_cast<u32>(span.length) <= min_of(room, static_cast<u32>(longest));
}
// The span, or none of the rows: to shorten it would let it reach over its neighbours' rows.
ATTNGEN_HD Span span_within(Span span, int rows, int longest) {
  return lies_within(span, rows, longest) ? span : Span{0, 0};
}
// How many of its first positions a sequence uses that has room for so many.
ATTNGEN_HD int length_within(int length, int room) { return min_of(max_of(length, 0), room); }

}  // namespace attngen
