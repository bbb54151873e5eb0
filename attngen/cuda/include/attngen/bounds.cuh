// Bounds of values: what an operation makes of any numbers within those of its operands. Where
// more may come of it than two numbers tell, its result may be anything of its type.
#pragma once

#include "attngen/platform.cuh"

namespace attngen {

// Values from `lo` to `hi`, both included. Of a bool: always true where lo is, never where hi is
// not. Of a float: NaN, too, where an end is infinite.
template <class T>
struct Bounds {
  T lo;
  T hi;
  ATTNGEN_HD bool is_point() const { return lo == hi; }
};

template <class T>
ATTNGEN_HD Bounds<T> exactly(T x) {
  return {x, x};
}
template <class T>
struct Whole;
template <>
struct Whole<bool> {
  static constexpr bool lo = false, hi = true;
};
template <>
struct Whole<int> {
  static constexpr int lo = -2147483647 - 1, hi = 2147483647;
};
template <>
struct Whole<long long> {
  static constexpr long long lo = -9223372036854775807ll - 1, hi = 9223372036854775807ll;
};
template <>
struct Whole<float> {
  static constexpr float lo = -kInfinity, hi = kInfinity;
};
template <class T>
ATTNGEN_HD Bounds<T> anything() {
  return {Whole<T>::lo, Whole<T>::hi};
}
template <>
ATTNGEN_HD Bounds<float> exactly(float x) {
  if (x == x) return {x, x};
  return anything<float>();  // NaN
}
template <class T>
ATTNGEN_HD Bounds<T> hull(Bounds<T> a, Bounds<T> b) {
  return {min_of(a.lo, b.lo), max_of(a.hi, b.hi)};
}
// Infinite ends may stand for NaN, of which no order holds.
ATTNGEN_HD bool may_be_nan(Bounds<float> a) { return a.lo == -kInfinity || a.hi == kInfinity; }

// Of results in 64 bits those that fit their type; products of larger numbers may be anything.
constexpr long long kSafe = 1ll << 31;
template <class T>
ATTNGEN_HD bool is_safe(Bounds<T> x) {
  return x.lo >= -kSafe && x.hi <= kSafe;
}
ATTNGEN_HD Bounds<int> fitted(Bounds<long long> x, int) {
  const bool fits = x.lo >= Whole<int>::lo && x.hi <= Whole<int>::hi;
  return fits ? Bounds<int>{static_cast<int>(x.lo), static_cast<int>(x.hi)} : anything<int>();
}
ATTNGEN_HD Bounds<long long> fitted(Bounds<long long> x, long long) { return x; }
ATTNGEN_HD Bounds<float> fitted(Bounds<float> x, float) {
  return x.lo <= x.hi ? x : anything<float>();  // NaN is neither
}

template <class T>
ATTNGEN_HD Bounds<T> bound_add(Bounds<T> a, Bounds<T> b) {
  if (!is_safe(a) || !is_safe(b)) return anything<T>();
  return fitted(
      Bounds<long long>{static_cast<long long>(a.lo) + b.lo, static_cast<long long>(a.hi) + b.hi},
      T());
}
ATTNGEN_HD Bounds<float> bound_add(Bounds<float> a, Bounds<float> b) {
  return fitted(Bounds<float>{a.lo + b.lo, a.hi + b.hi}, 0.f);
}
template <class T>
ATTNGEN_HD Bounds<T> bound_sub(Bounds<T> a, Bounds<T> b) {
  if (!is_safe(a) || !is_safe(b)) return anything<T>();
  return fitted(
      Bounds<long long>{static_cast<long long>(a.lo) - b.hi, static_cast<long long>(a.hi) - b.lo},
      T());
}
ATTNGEN_HD Bounds<float> bound_sub(Bounds<float> a, Bounds<float> b) {
  return fitted(Bounds<float>{a.lo - b.hi, a.hi - b.lo}, 0.f);
}
template <class T>
ATTNGEN_HD Bounds<T> bound_mul(Bounds<T> a, Bounds<T> b) {
  if (!is_safe(a) || !is_safe(b)) return anything<T>();
  const long long one = static_cast<long long>(a.lo) * b.lo,
                  two = static_cast<long long>(a.lo) * b.hi;
  const long long three = static_cast<long long>(a.hi) * b.lo,
                  four = static_cast<long long>(a.hi) * b.hi;
  return fitted(Bounds<long long>{min_of(min_of(one, two), min_of(three, four)),
                                  max_of(max_of(one, two), max_of(three, four))},
                T());
}
ATTNGEN_HD Bounds<float> bound_mul(Bounds<float> a, Bounds<float> b) {
  const float one = a.lo * b.lo, two = a.lo * b.hi, three = a.hi * b.lo, four = a.hi * b.hi;
  if (one != one || two != two || three != three || four != four) return anything<float>();
  return {min_of(min_of(one, two), min_of(three, four)),
          max_of(max_of(one, two), max_of(three, four))};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_neg(Bounds<T> a) {
  return bound_sub(exactly(T()), a);
}
template <class T>
ATTNGEN_HD Bounds<T> bound_abs(Bounds<T> a) {
  if (a.lo >= 0) return a;
  const Bounds<T> other = bound_neg(a);
  if (a.hi <= 0) return other;
  return {T(), max_of(a.hi, other.hi)};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_min(Bounds<T> a, Bounds<T> b) {
  return {min_of(a.lo, b.lo), min_of(a.hi, b.hi)};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_max(Bounds<T> a, Bounds<T> b) {
  return {max_of(a.lo, b.lo), max_of(a.hi, b.hi)};
}
// NaN stays NaN beside any number.
ATTNGEN_HD Bounds<float> bound_min(Bounds<float> a, Bounds<float> b) {
  const bool known = !may_be_nan(a) && !may_be_nan(b);
  return {known ? min_of(a.lo, b.lo) : -kInfinity, min_of(a.hi, b.hi)};
}
ATTNGEN_HD Bounds<float> bound_max(Bounds<float> a, Bounds<float> b) {
  const bool known = !may_be_nan(a) && !may_be_nan(b);
  return {max_of(a.lo, b.lo), known ? max_of(a.hi, b.hi) : kInfinity};
}
template <class T>
ATTNGEN_HD T floor_quotient(T x, T y) {
  return x / y - (x % y != 0 && (x < 0) != (y < 0));
}
// By one number above 0: quotients never decrease.
template <class T>
ATTNGEN_HD Bounds<T> bound_fdiv(Bounds<T> a, Bounds<T> b) {
  if (!b.is_point() || b.lo <= 0) return anything<T>();
  return {floor_quotient(a.lo, b.lo), floor_quotient(a.hi, b.lo)};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_tdiv(Bounds<T> a, Bounds<T> b) {
  if (!b.is_point() || b.lo <= 0) return anything<T>();
  return {static_cast<T>(a.lo / b.lo), static_cast<T>(a.hi / b.lo)};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_mod(Bounds<T> a, Bounds<T> b) {
  if (!b.is_point() || b.lo <= 0) return anything<T>();
  const T first = floor_quotient(a.lo, b.lo);
  if (first == floor_quotient(a.hi, b.lo))
    return {static_cast<T>(a.lo - first * b.lo), static_cast<T>(a.hi - first * b.lo)};
  return {T(), static_cast<T>(b.lo - 1)};
}
template <class T>
ATTNGEN_HD Bounds<T> bound_shr(Bounds<T> a, Bounds<T> b) {
  if (!b.is_point() || b.lo < 0 || b.lo > 31) return anything<T>();
  return {static_cast<T>(a.lo >> b.lo), static_cast<T>(a.hi >> b.lo)};
}

// ---- of floats
#if defined(__CUDACC__)
ATTNGEN_DEVICE Bounds<float> bound_floor(Bounds<float> a) { return {floorf(a.lo), floorf(a.hi)}; }
ATTNGEN_DEVICE Bounds<float> bound_ceil(Bounds<float> a) { return {ceilf(a.lo), ceilf(a.hi)}; }
#else
inline Bounds<float> bound_floor(Bounds<float> a) {
  return {__builtin_floorf(a.lo), __builtin_floorf(a.hi)};
}
inline Bounds<float> bound_ceil(Bounds<float> a) {
  return {__builtin_ceilf(a.lo), __builtin_ceilf(a.hi)};
}
#endif

// ---- bools
template <class T>
ATTNGEN_HD Bounds<bool> bound_lt(Bounds<T> a, Bounds<T> b) {
  return {a.hi < b.lo, a.lo < b.hi};
}
template <class T>
ATTNGEN_HD Bounds<bool> bound_le(Bounds<T> a, Bounds<T> b) {
  return {a.hi <= b.lo, a.lo <= b.hi};
}
ATTNGEN_HD Bounds<bool> bound_lt(Bounds<float> a, Bounds<float> b) {
  return {a.hi < b.lo && !may_be_nan(a) && !may_be_nan(b), a.lo < b.hi};
}
ATTNGEN_HD Bounds<bool> bound_le(Bounds<float> a, Bounds<float> b) {
  return {a.hi <= b.lo && !may_be_nan(a) && !may_be_nan(b), a.lo <= b.hi};
}
template <class T>
ATTNGEN_HD Bounds<bool> bound_gt(Bounds<T> a, Bounds<T> b) {
  return bound_lt(b, a);
}
template <class T>
ATTNGEN_HD Bounds<bool> bound_ge(Bounds<T> a, Bounds<T> b) {
  return bound_le(b, a);
}
ATTNGEN_HD Bounds<bool> bound_not(Bounds<bool> a) { return {!a.hi, !a.lo}; }
template <class T>
ATTNGEN_HD Bounds<bool> bound_eq(Bounds<T> a, Bounds<T> b) {
  return {a.is_point() && b.is_point() && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi};
}
template <class T>
ATTNGEN_HD Bounds<bool> bound_ne(Bounds<T> a, Bounds<T> b) {
  return bound_not(bound_eq(a, b));
}
ATTNGEN_HD Bounds<bool> bound_and(Bounds<bool> a, Bounds<bool> b) {
  return {a.lo && b.lo, a.hi && b.hi};
}
ATTNGEN_HD Bounds<bool> bound_or(Bounds<bool> a, Bounds<bool> b) {
  return {a.lo || b.lo, a.hi || b.hi};
}
ATTNGEN_HD Bounds<bool> bound_xor(Bounds<bool> a, Bounds<bool> b) { return bound_ne(a, b); }
template <class T>
ATTNGEN_HD Bounds<T> bound_where(Bounds<bool> which, Bounds<T> a, Bounds<T> b) {
  return which.lo ? a : which.hi ? hull(a, b) : b;
}

// ---- from type to type, in the order of numbers
template <class T, class From>
ATTNGEN_HD Bounds<T> bound_cast(Bounds<From> a) {
  return {static_cast<T>(a.lo), static_cast<T>(a.hi)};
}
template <>
ATTNGEN_HD Bounds<int> bound_cast<int, long long>(Bounds<long long> a) {
  return fitted(a, 0);
}
template <>
ATTNGEN_HD Bounds<int> bound_cast<int, float>(Bounds<float> a) {
  return a.lo > -0x1p30f && a.hi < 0x1p30f
             ? Bounds<int>{static_cast<int>(a.lo), static_cast<int>(a.hi)}
             : anything<int>();
}
template <>
ATTNGEN_HD Bounds<long long> bound_cast<long long, float>(Bounds<float> a) {
  const Bounds<int> found = bound_cast<int>(a);
  return found.lo == Whole<int>::lo ? anything<long long>() : Bounds<long long>{found.lo, found.hi};
}
template <class From>
ATTNGEN_HD Bounds<bool> truth_of(Bounds<From> a) {
  return bound_ne(a, exactly(From()));
}

}  // namespace attngen
