// Stands in for CUTLASS's complex numbers, so that wrappers of their products parse: none is
// called.
#pragma once

#include <cute/config.hpp>

namespace cute {

template <class Part>
struct complex {
  Part parts[2];

  complex() = default;
  CUTE_HOST_DEVICE complex(Part re, Part im) : parts{re, im} {}
  CUTE_HOST_DEVICE Part& real() { return parts[0]; }
  CUTE_HOST_DEVICE Part& imag() { return parts[1]; }
  CUTE_HOST_DEVICE const Part& real() const { return parts[0]; }
  CUTE_HOST_DEVICE const Part& imag() const { return parts[1]; }
};
template <class Part>
CUTE_HOST_DEVICE complex<Part> operator+(complex<Part> a, complex<Part> b) {
  return {a.real() + b.real(), a.imag() + b.imag()};
}
template <class Part>
CUTE_HOST_DEVICE complex<Part> operator*(complex<Part> a, complex<Part> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

}  // namespace cute
