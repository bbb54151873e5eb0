// Tensor cores, and matrices that a warp moves.
#include <algorithm>
#include <cstdio>

#include "machine.hpp"

namespace emulator {
namespace {

// In accumulators that products in flight will write: a signalling NaN, which no arithmetic leaves.
constexpr u32 kPoison = 0x7fadcba9;
constexpr int kRows = 16;  // of a warp
constexpr int kMaxN = 256;

bool is_narrow(Format format) { return format == Format::kE4m3 || format == Format::kE5m2; }
// Elements in 32 bytes, a step of the reduction.
int step_of(Format format) { return is_narrow(format) ? 32 : 16; }

// 16 bytes.
template <class Take>
void decode_piece(Format format, const unsigned char* from, Take take) {
  if (is_narrow(format)) {
    for (int i = 0; i < 16; ++i) take(i, decode(format, from[i]));
  } else {
    u32 words[4];
    std::memcpy(words, from, 16);
    for (int i = 0; i < 8; ++i) take(i, decode(format, words[i / 2] >> i % 2 * 16 & 0xffff));
  }
}

// An operand in shared memory, as a descriptor has it.
struct Operand {
  u32 start, box_bytes, group_bytes;

  Operand(u32 low, u32 high)
      : start((low & 0x3fff) << 4),
        box_bytes((low >> 16 & 0x3fff) << 4),
        group_bytes((high & 0x3fff) << 4) {}

  // Element `column` of row `row`, where the reduction is along the rows.
  template <class Take>
  void read_along(Format format, int row, Take take) const {
    const u32 at = start + row / 8 * group_bytes + row % 8 * 128;
    const int each = step_of(format) / 2;
    for (int half = 0; half < 2; ++half) {
      decode_piece(format, read_async(swizzled(at + half * 16), 16),
                   [&](int i, float x) { take(half * each + i, x); });
    }
  }
  // Element `column` of row `k`, where it is across the rows, each n elements of 16 bits.
  template <class Take>
  void read_across(Format format, int k, int n, Take take) const {
    const u32 at = start + k / 8 * group_bytes + k % 8 * 128;
    for (int column = 0; column < n; column += 8) {
      const u32 place = at + column / 64 * box_bytes + column % 64 * 2;
      decode_piece(format, read_async(swizzled(place), 16),
                   [&](int i, float x) { take(column + i, x); });
    }
  }
};

// The 16 rows of A that a warp has in registers, 4 a lane.
template <class Take>
void read_fragment(Format format, int lane, const u32* registers, Take take) {
  const int bits = is_narrow(format) ? 8 : 16, each = 32 / bits;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i % 2 * 8;
    const int column = i / 2 * step_of(format) / 2 + lane % 4 * each;
    for (int e = 0; e < each; ++e) {
      take(row, column + e, decode(format, registers[i] >> e * bits & ((1u << bits) - 1)));
    }
  }
}

int row_of(int lane, int index) { return lane / 4 + (index >> 1 & 1) * 8; }
int column_of(int lane, int index) { return index / 4 * 8 + lane % 4 * 2 + index % 2; }

void add_step(const PendingProduct& pending, u32 warp, int step, float (*sums)[kMaxN]) {
  static thread_local float a[kRows][32], b[32][kMaxN];
  const Product& product = pending.product;
  const int n = product.n, depth = step_of(product.a);
  if (product.a_in_registers) {
    for (int lane = 0; lane < 32; ++lane) {
      read_fragment(product.a, lane, &pending.a[(lane * product.steps + step) * 4],
                    [&](int row, int k, float x) { a[row][k] = x; });
    }
  } else {
    const Operand operand(pending.a[step], pending.a_high);
    for (int row = 0; row < kRows; ++row) {
      operand.read_along(product.a, static_cast<int>(warp % 4) * kRows + row,
                         [&](int k, float x) { a[row][k] = x; });
    }
  }
  const Operand operand(pending.b[step], pending.b_high);
  if (product.across) {
    for (int k = 0; k < depth; ++k) {
      operand.read_across(product.b, k, n, [&](int column, float x) { b[k][column] = x; });
    }
  } else {
    for (int column = 0; column < n; ++column) {
      operand.read_along(product.b, column, [&](int k, float x) { b[k][column] = x; });
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < n; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
}

void run_product(Warp& warp, const PendingProduct& pending) {
  static thread_local float sums[kRows][kMaxN];
  Accumulators& acc = warp.accumulators.at(pending.key);
  const int half = pending.product.n / 2;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < half; ++i) {
      sums[row_of(lane, i)][column_of(lane, i)] =
          pending.accumulate ? acc.values[lane * half + i] : 0.f;
    }
  }
  for (int step = 0; step < pending.product.steps; ++step) {
    add_step(pending, warp.index, step, sums);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < half; ++i) {
      acc.values[lane * half + i] = sums[row_of(lane, i)][column_of(lane, i)];
    }
  }
  if (--acc.products != 0) return;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < half; ++i) {
      u32 bits;
      std::memcpy(&bits, acc.lanes[lane] + i, sizeof(bits));
      if (bits != kPoison) fail("accumulators were written while a product was in flight");
    }
    std::copy_n(&acc.values[lane * half], half, acc.lanes[lane]);
  }
  warp.accumulators.erase(pending.key);
}
void run_products(Warp& warp, u32 below_group) {
  while (!warp.products.empty() && warp.products.front().group < below_group) {
    const PendingProduct pending = std::move(warp.products.front());
    warp.products.pop_front();
    run_product(warp, pending);
  }
}

// The four warps of a warpgroup must take the same steps, from the same places of the program.
void take_step(const char* format, const void* site, int value = 0, u32 a = 0, u32 b = 0) {
  char text[96];
  const int length = std::snprintf(text, sizeof(text), format, value, a, b);
  std::snprintf(text + length, sizeof(text) - length, " at %p", site);
  Warp& warp = own_warp();
  std::vector<std::string>& steps = cta->steps[warp.index / 4];
  if (warp.steps == steps.size()) {
    steps.push_back(text);
  } else if (steps[warp.steps] != text) {
    fail("warps of a warpgroup part: %s, %s", steps[warp.steps].c_str(), text);
  }
  ++warp.steps;
}

struct Issue {
  const Product* product;
  float* acc;
  const u32 *a, *b;
  bool accumulate;
  u32 a_high, b_high;
  const void* site;
};
void issue(void* const* lanes) {
  const auto* const* issues = reinterpret_cast<const Issue* const*>(lanes);
  const Issue& first = *issues[0];
  const Product& product = *first.product;
  Warp& warp = own_warp();
  take_step("a product of %d columns, A %x, B %x", first.site, product.n,
            product.a_in_registers ? 0 : first.a[0], first.b[0]);
  PendingProduct pending{
      product,          first.acc,    {},           {first.b, first.b + product.steps},
      first.accumulate, first.a_high, first.b_high, warp.committed};
  if (!product.a_in_registers) pending.a.assign(first.a, first.a + product.steps);
  const int half = product.n / 2;
  Accumulators& acc = warp.accumulators[first.acc];
  const bool in_flight = acc.products++ != 0;
  if (!warp.fenced && (!in_flight || product.a_in_registers)) {
    fail("no wgmma.fence between threads' registers and a product");
  }
  acc.values.resize(32 * half);
  for (int lane = 0; lane < 32; ++lane) {
    const Issue& mine = *issues[lane];
    const bool same_a =
        product.a_in_registers || std::equal(pending.a.begin(), pending.a.end(), mine.a);
    if (!same_a || !std::equal(pending.b.begin(), pending.b.end(), mine.b) ||
        mine.accumulate != first.accumulate) {
      fail("lanes of a warp issue different products");
    }
    if (product.a_in_registers) {
      pending.a.insert(pending.a.end(), mine.a, mine.a + 4 * product.steps);
    }
    if (in_flight) continue;
    acc.lanes[lane] = mine.acc;
    std::copy_n(mine.acc, half, &acc.values[lane * half]);
    std::fill_n(mine.acc, half, __builtin_bit_cast(float, kPoison));
  }
  warp.products.push_back(std::move(pending));
  if (!late()) run_products(warp, ~0u);
}

struct Matrices {
  u32* fragment;
  u32 address;
};
// Lane i of each eight names the place of a row; lanes have two neighbours of a row, or of a
// column.
template <bool kStore, bool kTransposed, int kCount>
void move_matrices(void* const* lanes) {
  const auto* const* each = reinterpret_cast<const Matrices* const*>(lanes);
  for (int m = 0; m < kCount; ++m) {
    for (int lane = 0; lane < 32; ++lane) {
      u32& packed = each[lane]->fragment[m];
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4, column = lane % 4 * 2 + half;
        if (kTransposed) std::swap(row, column);
        unsigned char* at = shared_at(each[m * 8 + row]->address, 16) + column * 2;
        unsigned short element = static_cast<unsigned short>(packed >> half * 16);
        if (kStore) {
          std::memcpy(at, &element, 2);
        } else {
          std::memcpy(&element, at, 2);
          packed = half ? (packed & 0xffff) | static_cast<u32>(element) << 16 : element;
        }
      }
    }
  }
}

struct WarpProduct {
  float* acc;
  const u32* a;
  u32 b[2];
  Format format, format_b;
};

}  // namespace

void multiply(const Product& product, float* acc, const u32* a, const u32* b, bool accumulate,
              u32 a_high, u32 b_high) {
  Issue mine{&product, acc, a, b, accumulate, a_high, b_high, __builtin_return_address(0)};
  collective("a product", &mine, issue);
}
void multiply_fence() {
  collective("a fence of products", nullptr, [](void* const*) { own_warp().fenced = true; });
}
void multiply_commit() {
  collective("a commit", __builtin_return_address(0), [](void* const* lanes) {
    take_step("a commit", lanes[0]);
    ++own_warp().committed;
  });
}
void multiply_wait(int pending) {
  std::pair<u32, const void*> mine{pending, __builtin_return_address(0)};
  collective("a wait for products", &mine, [](void* const* lanes) {
    const auto& [left, site] = *static_cast<std::pair<u32, const void*>*>(lanes[0]);
    take_step("a wait for all but %d", site, static_cast<int>(left));
    const u32 committed = own_warp().committed;
    own_warp().fenced = false;
    if (committed > left) run_products(own_warp(), committed - left);
  });
}

void warp_multiply(Format format, Format format_b, float* acc, const u32 (&a)[4], u32 b0, u32 b1) {
  WarpProduct mine{acc, a, {b0, b1}, format, format_b};
  collective("a product of a warp", &mine, [](void* const* lanes) {
    const auto* const* each = reinterpret_cast<const WarpProduct* const*>(lanes);
    float rows[kRows][32], columns[8][32];
    const int depth = step_of(each[0]->format), neighbours = depth / 8;
    for (int lane = 0; lane < 32; ++lane) {
      const WarpProduct& one = *each[lane];
      read_fragment(one.format, lane, one.a, [&](int row, int k, float x) { rows[row][k] = x; });
      for (int i = 0; i < 2 * neighbours; ++i) {
        const int within = i % neighbours, bits = 32 / neighbours;
        const u32 stored = one.b[i / neighbours] >> within * bits & ((1u << bits) - 1);
        const int k = i / neighbours * (depth / 2) + lane % 4 * neighbours + within;
        columns[lane / 4][k] = decode(one.format_b, stored);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < depth; ++k) {
          each[lane]->acc[i] += rows[row_of(lane, i)][k] * columns[column_of(lane, i)][k];
        }
      }
    }
  });
}

void load_matrices(u32* fragment, u32 address, bool transposed) {
  Matrices mine{fragment, address};
  touch_read(address, 16);
  if (transposed) {
    collective("ldmatrix.trans", &mine, move_matrices<false, true, 4>);
  } else {
    collective("ldmatrix", &mine, move_matrices<false, false, 4>);
  }
}
void store_matrices(u32 address, const u32* fragment, int count, bool transposed) {
  u32 copy[4] = {};
  std::copy_n(fragment, count, copy);
  Matrices mine{copy, address};
  if (lane() < count * 8) wrote(address, 16);
  if (transposed) {
    collective("stmatrix.trans", &mine, move_matrices<true, true, 4>);
  } else if (count == 2) {
    collective("stmatrix.x2", &mine, move_matrices<true, false, 2>);
  } else {
    collective("stmatrix", &mine, move_matrices<true, false, 4>);
  }
}

}  // namespace emulator
