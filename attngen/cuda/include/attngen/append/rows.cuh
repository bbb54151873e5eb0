// A token's heads on their way from one tensor to another: copied, rotated, narrowed, by the lanes
// of a warp, 16 bytes of the target at a time where both tensors' heads begin at multiples of 16.
#pragma once

#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"

namespace attngen {

constexpr int kWarpLanes = 32;

// The heads of a token: where the first is read and written, and bytes from one to the next.
struct Rows {
  const char* from;
  long long from_head;
  char* to;
  long long to_head;
  int heads;

  ATTNGEN_DEVICE bool aligned() const {
    const auto places = reinterpret_cast<long long>(from) | reinterpret_cast<long long>(to);
    return ((places | from_head | to_head) & 15) == 0;
  }
};

// Rotation of the first `dim` columns of a head, by the cosines and sines of a position: of columns
// side by side where `pairs`, else of those half of `dim` apart. `wide`: they are float32, else as
// the tokens.
struct Turn {
  const char* cosines;
  const char* sines;
  int dim;
  bool pairs;
  bool wide;

  ATTNGEN_DEVICE bool aligned() const {
    const auto places = reinterpret_cast<long long>(cosines) | reinterpret_cast<long long>(sines);
    return (places & 15) == 0;
  }
};

// Asks L2 for a token's heads, kBytes each: they are on their way while their place is looked up,
// however few registers a lane has left for what it has asked for.
template <int kBytes>
ATTNGEN_DEVICE void ask_for_rows(const char* from, long long from_head, int heads, int lane) {
  constexpr int kLine = 128;  // bytes
  constexpr int kLines = ceil_div(kBytes, kLine);
  for (int line = lane; line < heads * kLines; line += kWarpLanes) {
    const char* address = from + line / kLines * from_head + line % kLines * kLine;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
  }
}

// kBytes of each head, as they are.
template <int kBytes>
ATTNGEN_DEVICE void copy_rows(const Rows& rows, int lane) {
  constexpr int kUnits = kBytes / 16;
  constexpr int kBatch = 4;  // of units that a lane has asked for before it stores the first
  if (kBytes % 16 == 0 && rows.aligned()) {
    const int all = rows.heads * kUnits;
    for (int first = lane; first < all; first += kBatch * kWarpLanes) {
      uint4 units[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = first + i * kWarpLanes;
        if (unit < all) {
          units[i] = load_once(rows.from + unit / kUnits * rows.from_head + unit % kUnits * 16);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = first + i * kWarpLanes;
        if (unit < all) {
          char* to = rows.to + unit / kUnits * rows.to_head + unit % kUnits * 16;
          *reinterpret_cast<uint4*>(to) = units[i];
        }
      }
    }
    return;
  }
  for (int byte = lane; byte < rows.heads * kBytes; byte += kWarpLanes) {
    const int head = byte / kBytes;
    rows.to[head * rows.to_head + byte % kBytes] = rows.from[head * rows.from_head + byte % kBytes];
  }
}

// One element, of 16 bits.
template <class Element>
ATTNGEN_DEVICE float read_one(const char* row, int column) {
  return Element::unpack(reinterpret_cast<const unsigned short*>(row)[column]).x;
}
// kCount of them, from a multiple of kCount on; 8 in one load where kAtOnce.
template <class Element, bool kAtOnce, int kCount>
ATTNGEN_DEVICE void read_many(float (&x)[kCount], const char* row, int column) {
  static_assert(kCount % 4 == 0, "in words");
  u32 words[kCount / 2];
  if constexpr (kAtOnce && kCount == 8) {
    const uint4 four = *reinterpret_cast<const uint4*>(row + 2 * column);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const uint2 two = reinterpret_cast<const uint2*>(row + 2 * column)[i];
      words[2 * i] = two.x;
      words[2 * i + 1] = two.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float2 both = Element::unpack(words[i]);
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}
// kCount cosines, or sines.
template <class Element, bool kAtOnce, int kCount>
ATTNGEN_DEVICE void read_table(float (&x)[kCount], const char* row, int column, bool wide) {
  if (!wide) {
    read_many<Element, kAtOnce>(x, row, column);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(row + 4 * column)[i];
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
}

// Of kCount columns' cosines, or sines: all, or, of pairs, the first half of the array.
template <class Element, bool kAtOnce, int kCount>
ATTNGEN_DEVICE void read_one_in_two(float (&x)[kCount], const char* row, int angle,
                                    const Turn& turn) {
  if (!turn.pairs) {
    read_table<Element, kAtOnce>(x, row, angle, turn.wide);
    return;
  }
  float half[kCount / 2];
  read_table<Element, kAtOnce>(half, row, angle, turn.wide);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) x[i] = half[i];
}

// The first and the second of two columns that turn together: rounded after each operation, as
// PyTorch's are.
ATTNGEN_DEVICE float turned_first(float x, float y, float cosine, float sine) {
  return __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
}
ATTNGEN_DEVICE float turned_second(float x, float y, float cosine, float sine) {
  return __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
}

// A column of a row, rotated.
template <class Element>
ATTNGEN_DEVICE float take_one(const char* row, int column, const Turn& turn) {
  const float own = read_one<Element>(row, column);
  if (column >= turn.dim) return own;
  const int half = turn.dim / 2;
  const bool first = turn.pairs ? column % 2 == 0 : column < half;
  const int apart = turn.pairs ? 1 : half;
  const float other = read_one<Element>(row, first ? column + apart : column - apart);
  const int angle = turn.pairs ? column / 2 : column % half;
  const float cosine = turn.wide ? reinterpret_cast<const float*>(turn.cosines)[angle]
                                 : read_one<Element>(turn.cosines, angle);
  const float sine = turn.wide ? reinterpret_cast<const float*>(turn.sines)[angle]
                               : read_one<Element>(turn.sines, angle);
  return first ? turned_first(own, other, cosine, sine) : turned_second(other, own, cosine, sine);
}
// Cosines and sines of kCount columns from a multiple of kCount on, of which pairs have one in two;
// halves are multiples of it, too.
template <class Element, bool kAtOnce, int kCount>
struct Angles {
  float cosines[kCount];
  float sines[kCount];

  ATTNGEN_DEVICE void read(int column, const Turn& turn) {
    if (column >= turn.dim) return;
    const int half = turn.dim / 2;
    const int angle = turn.pairs ? column / 2 : column < half ? column : column - half;
    read_one_in_two<Element, kAtOnce>(cosines, turn.cosines, angle, turn);
    read_one_in_two<Element, kAtOnce>(sines, turn.sines, angle, turn);
  }
};
// kCount columns of a row, rotated.
template <class Element, bool kAtOnce, int kCount>
ATTNGEN_DEVICE void take_many(float (&x)[kCount], const char* row, int column, const Turn& turn,
                              const Angles<Element, kAtOnce, kCount>& angles) {
  read_many<Element, kAtOnce>(x, row, column);
  if (column >= turn.dim) return;
  if (turn.pairs) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float first = x[2 * i];
      const float cosine = angles.cosines[i];
      const float sine = angles.sines[i];
      x[2 * i] = turned_first(first, x[2 * i + 1], cosine, sine);
      x[2 * i + 1] = turned_second(first, x[2 * i + 1], cosine, sine);
    }
    return;
  }
  const int half = turn.dim / 2;
  const bool first = column < half;
  float others[kCount];
  read_many<Element, kAtOnce>(others, row, first ? column + half : column - half);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float cosine = angles.cosines[i];
    const float sine = angles.sines[i];
    x[i] = first ? turned_first(x[i], others[i], cosine, sine)
                 : turned_second(others[i], x[i], cosine, sine);
  }
}

// 8 numbers of kBytes each, multiplied by `scale` where that is 1.
template <class Stored, int kBytes>
ATTNGEN_DEVICE void put_many(char* to, const float (&x)[8], float scale) {
  u32 words[2 * kBytes];
#pragma unroll
  for (int i = 0; i < 2 * kBytes; ++i) {
    if constexpr (kBytes == 2) {
      words[i] = Stored::pack(x[2 * i], x[2 * i + 1]);
    } else {
      const u32 low = Stored::pack(__fmul_rn(x[4 * i], scale), __fmul_rn(x[4 * i + 1], scale));
      const float third = __fmul_rn(x[4 * i + 2], scale);
      words[i] = low | Stored::pack(third, __fmul_rn(x[4 * i + 3], scale)) << 16;
    }
  }
  if constexpr (kBytes == 2) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = uint2{words[0], words[1]};
  }
}
template <class Stored, int kBytes>
ATTNGEN_DEVICE void put_one(char* row, int column, float x, float scale) {
  if constexpr (kBytes == 2) {
    reinterpret_cast<unsigned short*>(row)[column] = Stored::pack(x, 0.f);
  } else {
    row[column] = Stored::pack(__fmul_rn(x, scale), 0.f);
  }
}

// kDim columns of each head, all of which turn with those half of kDim apart, and stored as kBytes
// each: a lane has both, each read once. Other arguments as of make_rows.
template <class Element, class Stored, int kBytes, int kDim, bool kAtOnce>
ATTNGEN_DEVICE void make_halves(const Rows& rows, const Turn& turn, const float* scales, int stride,
                                int lane) {
  constexpr int kCount = 8;
  constexpr int kHalf = kDim / 2;
  constexpr int kUnits = kHalf / kCount;
  constexpr bool kSame =
      kWarpLanes % kUnits == 0;  // whether a lane's columns are those of each head
  float cosines[kCount];
  float sines[kCount];
  if constexpr (kSame) {
    read_table<Element, kAtOnce>(cosines, turn.cosines, lane % kUnits * kCount, turn.wide);
    read_table<Element, kAtOnce>(sines, turn.sines, lane % kUnits * kCount, turn.wide);
  }
  for (int unit = lane; unit < rows.heads * kUnits; unit += kWarpLanes) {
    const int head = unit / kUnits;
    const int column = unit % kUnits * kCount;
    const char* from = rows.from + head * rows.from_head;
    float first[kCount];
    float second[kCount];
    read_many<Element, kAtOnce>(first, from, column);
    read_many<Element, kAtOnce>(second, from, column + kHalf);
    if constexpr (!kSame) {
      read_table<Element, kAtOnce>(cosines, turn.cosines, column, turn.wide);
      read_table<Element, kAtOnce>(sines, turn.sines, column, turn.wide);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float x = first[i];
      first[i] = turned_first(x, second[i], cosines[i], sines[i]);
      second[i] = turned_second(x, second[i], cosines[i], sines[i]);
    }
    const float scale = scales == nullptr ? 1.f : scales[head * stride];
    char* to = rows.to + head * rows.to_head + column * kBytes;
    put_many<Stored, kBytes>(to, first, scale);
    put_many<Stored, kBytes>(to + kHalf * kBytes, second, scale);
  }
}

// kDim columns of each head, rotated, and stored as kBytes each. `scales`: of the heads, `stride`
// apart, or null for 1. kAtOnce: whether 8 columns come in one load, for which kernels that do not
// narrow have no registers left.
template <class Element, class Stored, int kBytes, int kDim, bool kAtOnce>
ATTNGEN_DEVICE void make_rows(const Rows& rows, const Turn& turn, const float* scales, int stride,
                              int lane) {
  constexpr int kCount = 8;  // columns of a unit, which a lane reads at once
  constexpr int kUnits = kDim / kCount;
  constexpr int kBatch = 1;  // of units that a lane has asked for before it stores the first
  const bool whole = kDim % kCount == 0 && turn.dim % (2 * kCount) == 0;
  if (whole && rows.aligned() && turn.aligned()) {
    if constexpr (kDim % (2 * kCount) == 0) {
      if (turn.dim == kDim && !turn.pairs) {
        make_halves<Element, Stored, kBytes, kDim, kAtOnce>(rows, turn, scales, stride, lane);
        return;
      }
    }
    constexpr bool kSame = kWarpLanes % kUnits == 0;  // whether a lane's columns are each head's
    Angles<Element, kAtOnce, kCount> angles;
    if constexpr (kSame) angles.read(lane % kUnits * kCount, turn);
    const int all = rows.heads * kUnits;
    for (int start = lane; start < all; start += kBatch * kWarpLanes) {
      float x[kBatch][kCount];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = start + i * kWarpLanes;
        if (unit < all) {
          const char* from = rows.from + unit / kUnits * rows.from_head;
          const int column = unit % kUnits * kCount;
          if constexpr (!kSame) angles.read(column, turn);
          take_many(x[i], from, column, turn, angles);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int unit = start + i * kWarpLanes;
        if (unit < all) {
          const int head = unit / kUnits;
          const float scale = scales == nullptr ? 1.f : scales[head * stride];
          put_many<Stored, kBytes>(rows.to + head * rows.to_head + unit % kUnits * kCount * kBytes,
                                   x[i], scale);
        }
      }
    }
    return;
  }
  for (int at = lane; at < rows.heads * kDim; at += kWarpLanes) {
    const int head = at / kDim;
    const float x = take_one<Element>(rows.from + head * rows.from_head, at % kDim, turn);
    const float scale = scales == nullptr ? 1.f : scales[head * stride];
    put_one<Stored, kBytes>(rows.to + head * rows.to_head, at % kDim, x, scale);
  }
}

}  // namespace attngen
