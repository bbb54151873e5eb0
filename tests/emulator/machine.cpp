// Threads, what they wait for, and shared memory.
#include "machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

alignas(1024) thread_local unsigned char shared[emulator::kSharedBytes + emulator::kGuardBytes];

namespace emulator {

thread_local Cta* cta;

namespace {

constexpr unsigned char kGuard = 0x5a;
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 * kPage;
constexpr int kPasses = 16;                    // of a CTA in its turn
constexpr std::chrono::seconds kLongest(100);  // of a launch: nothing else can interrupt it

// ---- fibers
void change_to_scheduler() {
  if (_setjmp(self().state) == 0) _longjmp(cta->scheduler, 1);
}

void run_fiber() {
  cta->launch->entry(cta->launch->parameters);
  Fiber& fiber = self();
  if (!fiber.stores.empty() || !fiber.groups.empty()) {
    fail("a thread ends while its stores may still read shared memory");
  }
  if (!own_warp().products.empty()) fail("a warp ends before its products");
  const auto in_flight = [](const std::vector<Action>& group) { return !group.empty(); };
  if (in_flight(fiber.copies) ||
      std::any_of(fiber.copy_groups.begin(), fiber.copy_groups.end(), in_flight)) {
    fail("a thread ends while copies that it started are in flight");
  }
  for (Action& write : fiber.unwritten) write();
  fiber.ended = true;
  change_to_scheduler();
}

void resume(Fiber& fiber) {
  cta->current = &fiber;
  fiber.ready = nullptr;
  fiber.spinning = false;
  if (_setjmp(cta->scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.state, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

// Memory for the stacks of a CTA's threads, an inaccessible page below each.
class Stacks {
 public:
  explicit Stacks(size_t count) : bytes_(count * kStackBytes) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory_ = static_cast<unsigned char*>(memory);
    for (size_t i = 0; i < count; ++i) mprotect(memory_ + i * kStackBytes, kPage, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;

  void begin(Fiber& fiber) {
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = memory_ + fiber.thread * kStackBytes + kPage;
    fiber.start.uc_stack.ss_size = kStackBytes - kPage;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }

 private:
  size_t bytes_;
  unsigned char* memory_;
};

// ---- CTAs
std::unique_ptr<Cta> begin_cta(Launch& launch, u32 index, Stacks& stacks) {
  auto made = std::make_unique<Cta>();
  cta = made.get();
  const u32 threads = launch.block.x;
  made->launch = &launch;
  made->index = index;
  launch.running[index] = {made.get(), shared};
  made->block = {index % launch.grid.x, index / launch.grid.x % launch.grid.y,
                 index / launch.grid.x / launch.grid.y};
  made->random.seed(launch.seed * 1000003 + index);
  made->fibers = std::vector<Fiber>(threads);
  made->warps = std::vector<Warp>((threads + 31) / 32);
  made->steps.resize((threads + 127) / 128);
  made->writes.resize(kSharedBytes / 16);
  made->read.resize((launch.shared_bytes + 3) / 4);
  made->written.resize((launch.shared_bytes + 3) / 4);
  made->alive = threads;
  for (u32 i = 0; i < made->warps.size(); ++i) made->warps[i].index = i;
  for (u32 i = 0; i < threads; ++i) {
    made->fibers[i].thread = i;
    stacks.begin(made->fibers[i]);
  }
  std::memset(shared, 0xff, kSharedBytes);  // NaN in every format
  if (launch.shared_bytes > 0) std::memset(shared + launch.shared_bytes, kGuard, kGuardBytes);
  return made;
}

// Whether nothing was written behind a CTA's shared memory: pointers into it are not looked at.
bool guard_is_whole(const Launch& launch) {
  const unsigned char* guard = shared + launch.shared_bytes;
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  return launch.shared_bytes == 0 || std::all_of(guard, guard + kGuardBytes, is_guard);
}

void run_copy(size_t index) {
  const Action copy = std::move(cta->copies[index]);
  cta->copies.erase(cta->copies.begin() + static_cast<long>(index));
  cta->current = nullptr;
  if (_setjmp(cta->scheduler) == 0) copy();  // else it has failed
}

// Runs the threads that can, once; at random times only some of the warps, of which lanes may rest
// for a while: they keep in step no longer than it takes to part them. Whether one got anywhere.
bool run_threads(bool some) {
  bool moved = false;
  const size_t warps = cta->warps.size();
  const size_t first = cta->random() % warps;
  for (size_t w = 0; w < warps; ++w) {
    if (some && cta->random() % 2 != 0) continue;
    const size_t warp = (first + w) % warps;
    u32& resting = cta->warps[warp].resting;
    if (some && cta->random() % 8 == 0) {
      resting = cta->random() % 4 == 0 ? static_cast<u32>(cta->random()) : 0;
    }
    for (size_t i = warp * 32; i < std::min(warp * 32 + 32, cta->fibers.size()); ++i) {
      if (some && (resting >> i % 32 & 1)) continue;
      Fiber& fiber = cta->fibers[i];
      if (fiber.ended || (fiber.ready && !fiber.ready(fiber.context))) continue;
      resume(fiber);
      if (!cta->launch->error.empty()) return true;
      moved |= !fiber.spinning;
      cta->alive -= fiber.ended;
    }
  }
  return moved;
}

// Whether anything of the CTA got anywhere.
bool run_once() {
  bool moved = false;
  for (size_t i = cta->copies.size(); i-- > 0;) {
    if (late()) continue;
    run_copy(i);
    moved = true;
  }
  const bool some = cta->launch->timing == Timing::kRandom && cta->random() % 16 != 0;
  moved |= run_threads(some);
  if (some && !moved) moved = run_threads(false);  // those whom chance left out
  if (!moved && !cta->copies.empty()) {
    run_copy(cta->random() % cta->copies.size());
    moved = true;
  }
  return moved;
}

std::string describe_deadlock() {
  std::map<std::string, std::vector<u32>> waiting;
  for (const Fiber& fiber : cta->fibers) {
    if (fiber.ended) continue;
    std::string what = fiber.spinning ? "a counter" : fiber.waits_for;
    if (what == "an mbarrier") what += " at " + std::to_string(fiber.waits_at);
    waiting[what].push_back(fiber.thread);
  }
  std::string text = "deadlock in CTA " + std::to_string(cta->block.x);
  for (const auto& [what, threads] : waiting) {
    text += "; " + std::to_string(threads.size()) + " threads from " + std::to_string(threads[0]) +
            " on await " + what;
  }
  return text;
}

// ---- the launch
// The kernel before, whose end threads may wait for.
void run_kernel_before(Launch& launch) {
  const auto begun = std::chrono::steady_clock::now();
  if (launch.kernel_before() != 0) launch.error = "the kernel before has failed";
  launch.kernel_before = nullptr;
  launch.fruitless = 0;
  launch.deadline += std::chrono::steady_clock::now() - begun;
}

// Of one place: goes on with its CTA, or takes the next. Whether there was one.
bool take_turn(Launch& launch, std::unique_ptr<Cta>& own, Stacks& stacks) {
  if (!launch.error.empty()) return false;
  if (!own) {
    if (launch.next_cta == launch.grid.x * launch.grid.y * launch.grid.z) return false;
    own = begin_cta(launch, launch.next_cta++, stacks);
  }
  bool moved = false;
  for (int i = 0; i < kPasses && own->alive != 0; ++i) {
    if (!run_once()) break;
    moved = true;
    if (!launch.error.empty()) return false;
  }
  launch.fruitless = moved ? 0 : launch.fruitless + 1;
  const bool stuck = launch.fruitless > 2 * launch.working;
  const bool by_chance = launch.timing == Timing::kRandom && own->random() % 64 == 0;
  if (launch.kernel_before && (stuck || by_chance)) {
    run_kernel_before(launch);
    return launch.error.empty();
  }
  if (stuck) launch.error = describe_deadlock();
  if (std::chrono::steady_clock::now() > launch.deadline) launch.error = "it took too long";
  if (own->alive == 0) {
    if (!own->copies.empty()) launch.error = "a CTA ends before its copies have arrived";
    if (!guard_is_whole(launch)) launch.error = "a write behind the end of shared memory";
    for (const Warp& warp : own->warps) {
      if (warp.steps == own->steps[warp.index / 4].size()) continue;
      launch.error = "warp " + std::to_string(warp.index) + " takes fewer steps than its warpgroup";
    }
    launch.running.erase(own->index);
    own.reset();
  }
  return true;
}

void work(Launch& launch, int place) {
  Stacks stacks(launch.block.x);
  std::unique_ptr<Cta> own;
  bool working = true;
  std::unique_lock<std::mutex> lock(launch.mutex);
  for (;;) {
    launch.changed.wait(lock, [&] { return launch.turn == place || launch.working == 0; });
    if (launch.working == 0) return;
    if (working && !take_turn(launch, own, stacks)) {
      working = false;
      --launch.working;
    }
    launch.turn = (place + 1) % launch.places;
    launch.changed.notify_all();
  }
}

}  // namespace

bool late() {
  const Timing timing = cta->launch->timing;
  return timing == Timing::kRandom ? cta->random() % 2 != 0 : timing == Timing::kLate;
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  char place[96] = " (copy engine)";
  if (cta->current) {
    std::snprintf(place, sizeof(place), " (CTA %u %u %u, thread %u)", cta->block.x, cta->block.y,
                  cta->block.z, self().thread);
  }
  cta->launch->error = std::string(text) + place;
  _longjmp(cta->scheduler, 1);  // nothing of the launch is resumed
}

void wait(const char* what, bool (*ready)(void*), void* context) {
  while (!ready(context)) {
    Fiber& fiber = self();
    fiber.waits_for = what;
    fiber.ready = ready;
    fiber.context = context;
    change_to_scheduler();
  }
}

void spin() {
  self().spinning = true;
  change_to_scheduler();
}
void pause() {
  if (late()) change_to_scheduler();
}

void collective(const char* kind, void* mine, void (*execute)(void* const* lanes)) {
  Warp& warp = own_warp();
  if (warp.arrived == 0) {
    warp.kind = kind;
  } else if (std::strcmp(warp.kind, kind) != 0) {
    fail("lanes of a warp meet at %s and at %s", warp.kind, kind);
  }
  warp.lanes[self().thread % 32] = mine;
  const u32 generation = warp.generation;
  if (++warp.arrived == 32) {
    execute(warp.lanes);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_until(kind, [&] { return warp.generation != generation; });
  }
}

// ---- places
Index thread_index() { return {self().thread, 0, 0}; }
Index block_index() { return cta->block; }
Index block_size() { return cta->launch->block; }
Index grid_size() { return cta->launch->grid; }
u32 multiprocessors() { return static_cast<u32>(cta->launch->places); }

// ---- shared memory
u32 address_of(const void* pointer) {
  return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared);
}
unsigned char* shared_at(u32 address, u32 bytes) {
  const u32 size = cta->launch->shared_bytes;  // 0 where a kernel has static arrays instead
  if (size != 0 && u64{address} + bytes > size) {
    fail("%u bytes at %u of %u of shared memory", bytes, address, size);
  }
  const u32 unit = bytes < 16 ? bytes : 16;
  if (unit != 0 && address % unit != 0) fail("%u bytes at %u are not aligned", bytes, address);
  return shared + static_cast<int>(address);
}
void wrote(u32 address, u32 bytes) {
  touch_written(address, bytes);
  note_write(address, bytes, self().thread);
}
void note_write(u32 address, u32 bytes, u32 thread) {
  shared_at(address, bytes);
  if (cta->launch->shared_bytes == 0) return;
  ++cta->time;
  for (u32 i = address / 16; i < (address + bytes + 15) / 16; ++i) {
    cta->writes[i] = {cta->time, thread};
  }
}
void fence_async() { self().fenced = ++cta->time; }

const unsigned char* read_async(u32 address, u32 bytes) {
  const unsigned char* from = shared_at(address, bytes);
  if (cta->launch->shared_bytes == 0) fail("a copy or a product of static shared memory");
  for (u32 i = address / 16; i < (address + bytes + 15) / 16; ++i) {
    const Write& write = cta->writes[i];
    if (write.time > cta->fibers[write.thread].fenced && write.time > self().fenced) {
      fail("no fence between thread %u's write at %u and what reads it beside the threads",
           write.thread, i * 16);
    }
  }
  return from;
}
unsigned char* write_async(u32 address, u32 bytes) {
  unsigned char* to = shared_at(address, bytes);
  for (u32 i = address / 16; i < (address + bytes + 15) / 16; ++i) cta->writes[i] = {};
  return to;
}

// ---- mbarriers
namespace {

struct Mbarrier {
  int bytes;  // announced, not arrived
  unsigned pending : 12, expected : 12, phase : 1, tag : 7;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr unsigned kTag = 0x55;

Mbarrier& mbarrier_at(u32 address) {
  auto& barrier = shared_as<Mbarrier>(address);
  if (barrier.tag != kTag) fail("no mbarrier at %u", address);
  return barrier;
}
void complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
}

}  // namespace

void mbarrier_init(u32 address, u32 arrivals) {
  cta->has_mbarriers = true;
  shared_as<Mbarrier>(address) = {0, arrivals, arrivals, 0, kTag};
  cta->unfenced.push_back(address);
}
void mbarrier_init_fence() { cta->unfenced.clear(); }
void check_visible(u32 address) {
  const auto& hidden = cta->unfenced;
  if (std::find(hidden.begin(), hidden.end(), address) != hidden.end()) {
    fail("no fence between the start of the mbarrier at %u and a copy that it counts", address);
  }
}
void mbarrier_arrive(u32 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  if (barrier.pending == 0) fail("the mbarrier at %u counts fewer threads than arrive", address);
  barrier.bytes += static_cast<int>(bytes);
  barrier.pending -= 1;
  complete(barrier);
  if (cta->current) pause();
}
void mbarrier_wait(u32 address, u32 parity) {
  const Mbarrier& barrier = mbarrier_at(address);
  self().waits_at = address;
  wait_until("an mbarrier", [&] { return barrier.phase != (parity & 1); });
}
void deliver(u32 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  barrier.bytes -= static_cast<int>(bytes);
  complete(barrier);
}

// ---- clusters of two CTAs
Running& neighbour(u32 rank) {
  const auto found = cta->launch->running.find((cta->index & ~1u) | rank);
  if (rank > 1 || found == cta->launch->running.end()) fail("no CTA %u in the cluster", rank);
  return found->second;
}
unsigned char* write_async_at(u32 rank, u32 address) {
  Running& there = neighbour(rank);
  shared_at(address, 16);
  there.cta->writes[address / 16] = {};
  return there.shared + address;
}
namespace {
Mbarrier& mbarrier_of(u32 rank, u32 address) {
  shared_at(address, 8);
  auto& barrier = *reinterpret_cast<Mbarrier*>(neighbour(rank).shared + address);
  if (barrier.tag != kTag) fail("no mbarrier at %u of CTA %u of the cluster", address, rank);
  return barrier;
}
}  // namespace
void deliver_at(u32 rank, u32 address, u32 bytes) {
  Mbarrier& barrier = mbarrier_of(rank, address);
  barrier.bytes -= static_cast<int>(bytes);
  complete(barrier);
}
void mbarrier_arrive_at(u32 address, u32 rank) {
  Mbarrier& barrier = mbarrier_of(rank, address);
  if (barrier.pending == 0) fail("the mbarrier at %u counts fewer threads than arrive", address);
  barrier.pending -= 1;
  complete(barrier);
  pause();
}
void mbarrier_arrive_at_after(u32, u32 address, u32 rank) {
  if (lane() != 0) fail("lane %d arrives where a warp's first does", lane());
  mbarrier_arrive_at(address, rank);
}
u32 place_of(u32 address, u32 rank) {
  neighbour(rank);
  return (rank + 1) << 24 | address;
}
void send(u32 place, std::initializer_list<float> numbers, u32 barrier) {
  const u32 rank = (place >> 24) - 1;
  if (rank > 1 || barrier >> 24 != rank + 1) fail("no places of one CTA of the cluster");
  const u32 bytes = static_cast<u32>(numbers.size() * 4);
  const u32 address = place & 0xFFFFFF;
  if (address % bytes != 0) fail("%u bytes are sent to %u", bytes, address);
  unsigned char* to = write_async_at(rank, address & ~15u) + address % 16;
  std::memcpy(to, numbers.begin(), bytes);
  deliver_at(rank, barrier & 0xFFFFFF, bytes);
  pause();
}
void cluster_sync() {
  Cluster& cluster = cta->launch->clusters[cta->index / 2];
  const u32 generation = cluster.generation;
  if (++cluster.arrived == 2 * cta->launch->block.x) {
    cluster.arrived = 0;
    ++cluster.generation;
  }
  wait_until("the cluster", [&] { return cluster.generation != generation; });
}

// ---- named barriers
namespace {
void enter(u32 id, u32 threads, bool condition) {
  if (id > 15 || threads % 32 != 0 || threads == 0 || threads > cta->launch->block.x) {
    fail("named barrier %u for %u threads", id, threads);
  }
  NamedBarrier& barrier = cta->barriers[id];
  if (barrier.arrived == 0) {
    barrier.threads = threads;
    barrier.all = true;
  } else if (barrier.threads != threads) {
    fail("named barrier %u is for %u and for %u threads", id, barrier.threads, threads);
  }
  barrier.all &= condition;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.result = barrier.all;
    ++barrier.generation;
  }
}
}  // namespace

void barrier_arrive(u32 id, u32 threads) {
  enter(id, threads, true);
  pause();
}
bool barrier_all(u32 id, u32 threads, bool condition) {
  const NamedBarrier& barrier = cta->barriers[id & 15];
  const u32 generation = barrier.generation;
  enter(id, threads, condition);
  wait_until("a named barrier", [&] { return barrier.generation != generation; });
  begin_interval();
  return barrier.result;
}
void barrier_sync(u32 id, u32 threads) { barrier_all(id, threads, true); }

int load_acquire(const int* counter) {
  spin();
  return *counter;
}

void await_kernel_before() {
  wait_until("the kernel before", [] { return !cta->launch->kernel_before; });
}

}  // namespace emulator

// Runs a grid to its end; `kernel_before`, unless null, when threads that wait for its end are all
// that is left, or before, as the timing has it. Returns 0, or 1 with what went wrong in `message`.
extern "C" int emulator_run(void (*entry)(const void*), const void* parameters,
                            const unsigned* grid, unsigned threads, unsigned shared_bytes,
                            int places, int timing, unsigned long long seed, int (*kernel_before)(),
                            char* message, unsigned message_bytes) {
  using namespace emulator;
  Launch launch;
  launch.entry = entry;
  launch.parameters = parameters;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {threads, 1, 1};
  launch.shared_bytes = shared_bytes;
  launch.places = launch.working = places;
  launch.timing = static_cast<Timing>(timing);
  launch.seed = seed;
  launch.kernel_before = kernel_before;
  launch.deadline = std::chrono::steady_clock::now() + kLongest;
  const Faults faults;
  if (kernel_before && launch.timing == Timing::kEarly) run_kernel_before(launch);
  std::vector<std::thread> workers;
  for (int i = 0; i < places; ++i) workers.emplace_back(work, std::ref(launch), i);
  for (std::thread& worker : workers) worker.join();
  if (launch.kernel_before && launch.error.empty()) run_kernel_before(launch);
  std::snprintf(message, message_bytes, "%s", launch.error.c_str());
  return launch.error.empty() ? 0 : 1;
}
