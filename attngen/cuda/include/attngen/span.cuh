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

// Whether a tensor of `rows` rows has a row, or its end, there.
ATTNGEN_HD bool is_place(int start, int rows) {
  return static_cast<u32>(start) <= static_cast<u32>(rows);
}
// Rows of a span that begins there at most: as many as the tensor has from there on, `longest` if
// these are fewer.
ATTNGEN_HD u32 room_from(int start, int rows, int longest) {
  const u32 room = is_place(start, rows) ? static_cast<u32>(rows) - static_cast<u32>(start) : 0u;
  return min_of(room, static_cast<u32>(longest));
}
// Whether the tensor has all of the span.
ATTNGEN_HD bool lies_within(Span span, int rows, int longest) {
  const u32 room = room_from(span.start, rows, longest);
  return is_place(span.start, rows) && static_cast<u32>(span.length) <= room;
}
// The span, or none of the rows: to shorten it would let it reach over its neighbours' rows. In few
// registers, since some find it between products.
ATTNGEN_HD Span span_within(Span span, int rows, int longest) {
  const u32 room = room_from(span.start, rows, longest);
  return {is_place(span.start, rows) ? span.start : 0,
          static_cast<u32>(span.length) <= room ? span.length : 0};
}
// How many of its first positions a sequence uses that has room for so many.
ATTNGEN_HD int length_within(int length, int room) { return min_of(max_of(length, 0), room); }

}  // namespace attngen
