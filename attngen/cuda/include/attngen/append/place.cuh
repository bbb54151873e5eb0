// Where a new token belongs: its sequence, its position, and its place in a cache.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// A new token: which of its sequence's it is, and how many that has. `there`: whether it is one.
struct Token {
  int sequence;
  int row;
  int count;
  bool there;
};

// The token at a place of a dense tensor with room for `room` of each sequence. `ends`: cumulative
// numbers of tokens, or null where all room is used.
ATTNGEN_HD Token dense_token(const int* ends, int place, int room) {
  const int sequence = place / room;
  const int row = place - sequence * room;
  const int count = ends == nullptr ? room : ends[sequence + 1] - ends[sequence];
  return {sequence, row, count, row < count};
}

// How many tokens of a sequence came before: a number of `lengths`, or what the cumulative numbers
// of all tokens have more than those that are new.
ATTNGEN_HD int length_before(const int* lengths, const int* ends_all, const Token& token) {
  if (ends_all == nullptr) return lengths[token.sequence];
  return ends_all[token.sequence + 1] - ends_all[token.sequence] - token.count;
}

// A row of a page; none where the table, the page or the position leads nowhere.
struct Slot {
  long long page;
  long long row;
  bool there;
};

// Where a position of a sequence lies, in a table of `columns` pages a sequence, `stride` apart.
// Without a table the sequence's number is that of its only page.
ATTNGEN_HD Slot slot_of(const int* table, long long stride, int columns, int page_size, int pages,
                        int sequence, int position) {
  const int column = position / page_size;
  if (position < 0 || column >= columns) return {0, 0, false};
  const int page = table == nullptr ? sequence : table[sequence * stride + column];
  return {page, position - column * page_size, page >= 0 && page < pages};
}

#if defined(__CUDACC__)
// The token at a place of packed ones, by all lanes of a warp: `ends` are the cumulative numbers of
// `sequences`, of which a round leaves one part in 32.
ATTNGEN_DEVICE Token packed_token(const int* ends, int sequences, int place, int lane) {
  if (sequences == 0 || place >= ends[sequences]) return {0, 0, 0, false};
  int first = 0;  // ends[first] <= place, and no sequence from `last` on has it
  int last = sequences;
  while (last - first > 1) {
    const int step = ceil_div(last - first, 32);
    const int probe = first + (lane + 1) * step;
    const bool before = probe < last && ends[probe] <= place;
    first += __popc(__ballot_sync(~0u, before)) * step;
    last = min_of(first + step, last);
  }
  const int start = ends[first];
  return {first, place - start, ends[first + 1] - start, place >= start};
}
#endif

}  // namespace attngen
