// The parts of a multiprocessor on the host, for the files that make it up.
//
// A thread is a fiber, which changes over where it waits. CTAs run on operating-system threads,
// since their shared memory is thread-local, but take turns: a launch is the same each time for a
// seed. What a kernel may not rely on comes at random times: copies, products, warps' progress.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cuda.hpp"

extern thread_local unsigned char shared[];

namespace emulator {

using Action = std::function<void()>;

// When what runs beside a thread is done: at once, when it is awaited, or at either time.
enum class Timing { kEarly, kLate, kRandom };

struct Cta;

// A CTA whose neighbour may reach its shared memory.
struct Running {
  Cta* cta;
  unsigned char* shared;
};
// Threads of two neighbouring CTAs that have come to the barrier of their cluster.
struct Cluster {
  u32 arrived = 0, generation = 0;
};

struct Launch {
  void (*entry)(const void*);
  const void* parameters;
  Index grid, block;
  u32 shared_bytes;
  int places;  // of CTAs, which run beside each other
  Timing timing;
  u64 seed;
  int (*kernel_before)();  // runs it to its end, 0 if all went well; null once it has ended

  std::chrono::steady_clock::time_point deadline;
  u32 next_cta = 0;
  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;       // of the places
  int working;        // places that may have something to do
  int fruitless = 0;  // turns, one after another
  std::string error = {};
  std::map<u32, Running> running;   // by their places in the grid
  std::map<u32, Cluster> clusters;  // of two CTAs each
};

struct Fiber {
  u32 thread = 0;
  ucontext_t start;
  jmp_buf state;
  bool begun = false, ended = false, spinning = false;
  bool (*ready)(void*) = nullptr;  // null where it can go on
  void* context = nullptr;
  const char* waits_for = "";
  u32 waits_at = 0;            // of an mbarrier, its address
  u64 fenced = 0;              // when it last made its writes visible to the copy engine
  u32 interval = 1;            // between places where threads meet
  std::vector<Action> copies;  // cp.async that have not arrived, nor been committed
  std::deque<std::vector<Action>> copy_groups;  // committed
  std::vector<Action> stores;                   // bulk copies to global memory, not committed
  std::deque<std::vector<Action>> groups;       // committed, shared memory not read
  std::vector<Action> unwritten;                // read, global memory not written
};

// The accumulators of a warp that products in flight write: NaN until these are done.
struct Accumulators {
  float* lanes[32];
  std::vector<float> values;  // of the lanes, one after another
  int products = 0;
};
struct PendingProduct {
  Product product;
  float* key;          // lane 0's accumulators
  std::vector<u32> a;  // registers of each lane, or descriptors
  std::vector<u32> b;
  bool accumulate;
  u32 a_high, b_high;
  u32 group;
};

struct Warp {
  u32 index = 0;
  u32 resting = 0;  // lanes
  // Where its lanes meet.
  int arrived = 0;
  u32 generation = 0;
  const char* kind = "";
  void* lanes[32];
  // Products.
  std::deque<PendingProduct> products;
  std::map<float*, Accumulators> accumulators;
  u32 committed = 0;
  bool fenced = false;  // registers, since it last awaited products
  size_t steps = 0;     // of the warpgroup's that it has taken
};

struct NamedBarrier {
  u32 arrived = 0, threads = 0, generation = 0;
  u64 place = 0;  // of the program, where it is __syncthreads
  bool all = true, result = true;
};

// Who wrote 16 bytes of shared memory last, and when; nobody where the copy engine did.
struct Write {
  u64 time = 0;
  u32 thread = 0;
};

// Lanes of a warp that have touched 4 bytes of shared memory, in an interval between places where
// they meet.
struct Touch {
  u32 interval = 0, warp = 0, lanes = 0;
};

struct Cta {
  Launch* launch;
  u32 index;  // in the grid
  Index block;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<std::vector<std::string>> steps;  // of each warpgroup: what all its warps must do
  NamedBarrier barriers[16];
  std::vector<Action> copies;  // in flight, in any order
  std::vector<Write> writes;   // of shared memory
  std::vector<Touch> read, written;
  bool has_mbarriers = false;
  std::vector<u32> unfenced;  // mbarriers that the copy engine may not see yet
  u64 time = 0;               // counts writes and fences
  std::mt19937_64 random;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  u32 alive = 0;
};
extern thread_local Cta* cta;

inline Fiber& self() { return *cta->current; }
inline Warp& own_warp() { return cta->warps[self().thread / 32]; }

// Whether what could be done now is done later.
bool late();
// Blocks this thread until ready(context).
void wait(const char* what, bool (*ready)(void*), void* context);
template <class Ready>
void wait_until(const char* what, Ready ready) {
  wait(what, [](void* context) { return (*static_cast<Ready*>(context))(); }, &ready);
}
// Lets others run, without having got anywhere.
void spin();

// While there is one, an access to memory that is not there ends the launch with what it was.
class Faults {
 public:
  Faults();
  ~Faults();
};

// Bytes that the copy engine, or a product, reads or writes.
const unsigned char* read_async(u32 address, u32 bytes);
unsigned char* write_async(u32 address, u32 bytes);
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// What a thread wrote is visible to it, and to the copy engine after a fence.
void note_write(u32 address, u32 bytes, u32 thread);
// Fails where the copy engine may not see an mbarrier.
void check_visible(u32 barrier);
// Bytes arrive that an mbarrier awaits.
void deliver(u32 barrier, u32 bytes);
// The CTA `rank` of this one's cluster.
Running& neighbour(u32 rank);
// 16 bytes in its shared memory that the copy engine writes, and bytes that its mbarrier awaits.
unsigned char* write_async_at(u32 rank, u32 address);
void deliver_at(u32 rank, u32 barrier, u32 bytes);

}  // namespace emulator
