// What a kernel's source finds where a host compiles it: CUDA's qualifiers and intrinsics, and what
// its inline PTX became (instructions.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ thread_local
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

using u32 = unsigned;
using u64 = unsigned long long;

struct Index {
  u32 x, y, z;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
u32 multiprocessors();
inline int lane() { return thread_index().x % 32; }
// Cycles, a few more at each look.
inline u32 clock() {
  static thread_local u32 now = 0;
  return now += 40;
}

// Ends the launch with this message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Lets others run now and then: after what they may have waited for.
void pause();

// All 32 lanes meet at an operation of this kind; the last one carries it out for all.
void collective(const char* kind, void* mine, void (*execute)(void* const* lanes));

// ---- shared memory
constexpr u32 kSharedBytes = 227 << 10;
constexpr u32 kGuardBytes = 64;  // behind what a kernel asks for
u32 address_of(const void* pointer);
// Where `bytes` bytes lie. Fails outside of the CTA's memory, or where they are not aligned.
unsigned char* shared_at(u32 address, u32 bytes);
template <class T>
T& shared_as(u32 address) {
  return *reinterpret_cast<T*>(shared_at(address, sizeof(T)));
}
// Notes a write that the copy engine and tensor cores see after a fence only.
void wrote(u32 address, u32 bytes);
// Notes an access of a thread, and fails where another lane's is not ordered by a __syncwarp.
void touch_read(u32 address, u32 bytes);
void touch_written(u32 address, u32 bytes);
template <class T, int kCount>
void store_shared(u32 address, const T (&x)[kCount]) {
  std::memcpy(shared_at(address, sizeof(x)), x, sizeof(x));
  wrote(address, sizeof(x));
}
template <class T, int kCount>
void load_shared(T (&x)[kCount], u32 address) {
  std::memcpy(x, shared_at(address, sizeof(x)), sizeof(x));
  touch_read(address, sizeof(x));
}

// ---- barriers
void mbarrier_init(u32 barrier, u32 arrivals);
void mbarrier_init_fence();
void mbarrier_arrive(u32 barrier, u32 bytes = 0);
void mbarrier_wait(u32 barrier, u32 parity);
void barrier_sync(u32 id, u32 threads);
// What lies behind a barrier is not what lay before it: of the thread.
void begin_interval();
// __syncthreads, called with this frame: all threads of a CTA meet at one place of the program.
void block_sync(void* const* frame);
// Of two neighbouring CTAs: arrival at a barrier of the CTA `rank`, and all of their threads.
void mbarrier_arrive_at(u32 address, u32 rank);
void mbarrier_arrive_at_after(u32 loaded, u32 address, u32 rank);
void cluster_sync();
// An address of the CTA `rank` of a cluster, and numbers that are sent to one.
u32 place_of(u32 address, u32 rank);
void send(u32 place, std::initializer_list<float> numbers, u32 barrier);
void barrier_arrive(u32 id, u32 threads);
bool barrier_all(u32 id, u32 threads, bool condition);

// ---- copies
void copy_async(u32 destination, const void* source, u32 bytes, u32 present);
void commit_copies();
void await_copy_groups(u32 pending);
void await_copies();
void arrive_after_copies(u32 barrier);
void tensor_load(u32 destination, const void* map, u32 barrier, std::initializer_list<int> at);
// The same to both CTAs of a cluster.
void tensor_load_both(u32 destination, const void* map, u32 barrier, std::initializer_list<int> at);
void tensor_store(const void* map, u32 source, std::initializer_list<int> at);
void tensor_add(const void* map, u32 source, std::initializer_list<int> at);
void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier);
void bulk_store(void* destination, u32 source, u32 bytes);
void bulk_add(void* destination, u32 source, u32 bytes);
void bulk_commit();
void bulk_wait_read(u32 pending);
void bulk_wait();
void fence_async();

// ---- matrices
enum class Format { kBf16, kFp16, kE4m3, kE5m2 };
struct Product {
  int n, steps;
  Format a, b;
  bool a_in_registers;
  bool across;  // B has the reduction across its rows
};
// a: registers, or low words of descriptors as those of b are; the high words are the same in all.
void multiply(const Product& product, float* acc, const u32* a, const u32* b, bool accumulate,
              u32 a_high, u32 b_high);
void multiply_fence();
void multiply_commit();
void multiply_wait(int pending);
void warp_multiply(Format format, Format format_b, float* acc, const u32 (&a)[4], u32 b0, u32 b1);
void load_matrices(u32* fragment, u32 address, bool transposed);
void store_matrices(u32 address, const u32* fragment, int count, bool transposed);

// ---- numbers
u32 encode(Format format, float x);  // to nearest even; 8 bits saturate
float decode(Format format, u32 bits);
inline u32 pack16(Format format, float low, float high) {
  return encode(format, low) | encode(format, high) << 16;
}
inline u32 pack8(Format format, float low, float high) {
  return encode(format, low) | encode(format, high) << 8;
}
template <class Operation>
u32 each_half(Format format, Operation operation) {
  return pack16(format, operation([&](u32 x) { return decode(format, x & 0xffff); }),
                operation([&](u32 x) { return decode(format, x >> 16); }));
}
inline float positive(float x) { return x > 0.f || x != x ? x : 0.f; }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
u32 permute(u32 low, u32 high, u32 selector);

// ---- memory that CTAs share: they take turns
int load_acquire(const int* counter);
void await_kernel_before();
template <class T, class Change>
T exchange(T* target, Change change) {
  const T found = *target;
  *target = change(found);
  pause();
  return found;
}

inline void require_all(u32 lanes) {
  if (lanes != ~0u) fail("an operation of a part of a warp, %x", lanes);
}
struct Vote {
  u32 in, out;
  int source;
};
template <class T>
T shuffle(T value, int source) {
  static_assert(sizeof(T) <= 8);
  u32 words[2] = {};
  std::memcpy(words, &value, sizeof(T));
  for (u32 i = 0; i < (sizeof(T) + 3) / 4; ++i) {
    Vote vote{words[i], 0, source};
    collective("shuffle", &vote, [](void* const* lanes) {
      auto* const* votes = reinterpret_cast<Vote* const*>(lanes);
      for (int lane = 0; lane < 32; ++lane) votes[lane]->out = votes[votes[lane]->source]->in;
    });
    words[i] = vote.out;
  }
  std::memcpy(&value, words, sizeof(T));
  return value;
}
inline u32 ballot(bool condition) {
  Vote vote{condition, 0, 0};
  collective("vote", &vote, [](void* const* lanes) {
    auto* const* votes = reinterpret_cast<Vote* const*>(lanes);
    u32 all = 0;
    for (int i = 0; i < 32; ++i) all |= votes[i]->in << i;
    for (int i = 0; i < 32; ++i) votes[i]->out = all;
  });
  return vote.out;
}

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())

template <class T>
T __shfl_sync(unsigned lanes, T value, int source) {
  emulator::require_all(lanes);
  return emulator::shuffle(value, source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  emulator::require_all(lanes);
  return emulator::shuffle(value, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned lanes, T value, int distance) {
  emulator::require_all(lanes);
  const int lane = emulator::lane();
  return emulator::shuffle(value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned lanes, int condition) {
  emulator::require_all(lanes);
  return emulator::ballot(condition != 0);
}
inline int __any_sync(unsigned lanes, int condition) {
  return __ballot_sync(lanes, condition) != 0;
}
inline int __all_sync(unsigned lanes, int condition) {
  return __ballot_sync(lanes, condition) == ~0u;
}
inline void __syncwarp(unsigned lanes = ~0u) {
  emulator::require_all(lanes);
  emulator::collective("__syncwarp", nullptr, [](void* const*) {});
  emulator::begin_interval();
}
inline void __syncthreads() {
  emulator::block_sync(static_cast<void* const*>(__builtin_frame_address(0)));
}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __sinf(float x) { return std::sin(x); }  // off by 2^-21 at most, for up to half a turn
inline float __cosf(float x) { return std::cos(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// Rounded up, by way of a sum that hardly ever rounds.
inline float __fmaf_ru(float a, float b, float c) {
  const double exact = static_cast<double>(a) * b + c;
  const float near = static_cast<float>(exact);
  return near < exact ? std::nextafter(near, INFINITY) : near;
}
inline int max(int a, int b) { return a < b ? b : a; }
inline int min(int a, int b) { return b < a ? b : a; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline unsigned long long __cvta_generic_to_shared(const void* p) {
  return emulator::address_of(p);
}
inline void* __cvta_shared_to_generic(unsigned long long address) {
  return emulator::shared_at(static_cast<unsigned>(address), 0);
}
template <class T>
T atomicAdd(T* target, T x) {
  return emulator::exchange(target, [=](T found) { return found + x; });
}
template <class T>
T atomicExch(T* target, T x) {
  return emulator::exchange(target, [=](T) { return x; });
}
template <class T>
T atomicOr(T* target, T x) {
  return emulator::exchange(target, [=](T found) { return found | x; });
}
template <class T>
T atomicMax(T* target, T x) {
  return emulator::exchange(target, [=](T found) { return found < x ? x : found; });
}
template <class T>
T atomicMin(T* target, T x) {
  return emulator::exchange(target, [=](T found) { return x < found ? x : found; });
}
template <class T>
T atomicCAS(T* target, T compare, T x) {
  return emulator::exchange(target, [=](T found) { return found == compare ? x : found; });
}
