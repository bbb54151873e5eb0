// Rows that lie on pages, of any size, as all threads of a CTA copy them.
#pragma once

#include "attngen/copy/cta_rows.cuh"

namespace attngen {

// Rows of one head of a sequence, on pages of `count` that there are. Rows of others, and those at
// or beyond `rows`, count as 0.
template <class Fetch>
struct PagedRows {
  const char* first;  // of the head, on page 0
  long long row_bytes;
  long long page_bytes;
  Fetch fetch;
  const int* pages;  // of the sequence
  int count;
  int rows;
};

// Strides are in elements.
template <int kElementBytes = 2, class Fetch>
ATTNGEN_DEVICE PagedRows<Fetch> paged_rows(const void* tensor, const Fetch& fetch, int batch,
                                           long long head, long long stride_page,
                                           long long stride_head, long long stride_row, int count,
                                           int rows) {
  return {static_cast<const char*>(tensor) + kElementBytes * head * stride_head,
          kElementBytes * stride_row,
          kElementBytes * stride_page,
          fetch,
          fetch.pages(batch),
          count,
          rows};
}

// As that of rows in one place.
template <int kThreads, int kColumns, int kRows, class Fetch>
ATTNGEN_DEVICE void copy_rows(u32 tile, const PagedRows<Fetch>& from, int row) {
  using Share = RowShare<kThreads, kColumns, kRows>;
  const u32 target = tile + Share::place();
#pragma unroll
  for (int i = 0; i < kRows; i += Share::kRowsAtOnce) {
    const int position = row + Share::row() + i;
    const int place = from.fetch.place(position);
    const int page = position < from.rows ? from.pages[place] : -1;
    const bool there = static_cast<u32>(page) < static_cast<u32>(from.count);
    const int within = position - place * from.fetch.page_size;
    const char* source = from.first + (there ? page : 0) * from.page_bytes +
                         (there ? within : 0) * from.row_bytes + Share::piece() * 16;
    Share::copy(target + i * 128, source, there);
  }
}

}  // namespace attngen
