// cast_next_scales__full_d16_bf16_kv_e5m2_to_e5m2__fd2c6f
// Rendered by attngen from kernels/support/cast_next_scales.cu.j2; do not edit.
#include "attngen/cast/scale.cuh"
#include "attngen/platform.cuh"
#include "attngen/ptx/global.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/tma.cuh"

namespace attngen {

constexpr int kThreads = 256;
constexpr float kLargest = 57344.0f;

struct Params {
  void* scale;
  void* history;
  float share;
  int steps;
  int columns;
  int own;
  int of_all;
  int power_of_two;
};
// NVRTC has no offsetof; natural alignment and the total size pin every member's place.
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "packed by the host");
static_assert(sizeof(void*) == 8 && sizeof(long long) == 8 && sizeof(int) == 4, "packed by the host");
static_assert(sizeof(Params) == 40, "packed by the host");

// The next scale of a column: by its largest magnitude, or the newest; as it was where that is 0, infinite or NaN.
ATTNGEN_DEVICE float next_scale(const Params& p, int column, float before) {
  const u32* history = static_cast<const u32*>(p.history) + column;
  u32 most = history[0];
  const int steps = p.of_all ? p.steps : 1;
  for (int step = 1; step < steps; ++step) most = max_of(most, history[step * p.columns]);
  if (most == 0 || most >= kInfinityBits) return before;
  return scale_of_bits(
      most, {kLargest, 0.f, p.share, p.power_of_two != 0}, [](float x) { return __fdiv_rn(1.f, x); },
      [](float x) { return __float_as_uint(x); }, [](u32 bits) { return __uint_as_float(bits); });
}

}  // namespace attngen

// Grid: one CTA.
extern "C" __global__ void __launch_bounds__(256, 1)
cast_next_scales__full_d16_bf16_kv_e5m2_to_e5m2__fd2c6f(const __grid_constant__ attngen::Params p) {
  using namespace attngen;
  float* scales = static_cast<float*>(p.scale);
  const int column = threadIdx.x;
  if (column < p.columns) {
    scales[column] = column < p.own ? 0.f : next_scale(p, column, scales[column]);
  }
  // Rows move from the last on, by all threads at a time.
  u32* history = static_cast<u32*>(p.history);
  const int numbers = p.steps * p.columns;
  for (int end = numbers; end > 0; end -= kThreads) {
    const int at = end - 1 - threadIdx.x;
    const u32 moved = at >= p.columns ? history[at - p.columns] : 0;
    __syncthreads();
    if (at >= 0) history[at] = moved;
  }
}
