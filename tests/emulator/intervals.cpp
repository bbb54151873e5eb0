// What tools that watch shared memory and barriers find: lanes of a warp that read and write one
// place without meeting between, and threads of a CTA that meet at __syncthreads of different
// places.
#include "machine.hpp"

namespace emulator {
namespace {

// Whether lanes can tell what follows what: where there are mbarriers, some of them wait alone.
bool counts() { return cta->launch->shared_bytes != 0 && !cta->has_mbarriers; }

bool by_others(const Touch& touch) {
  const u32 mine = 1u << self().thread % 32;
  return touch.warp == own_warp().index && touch.interval == self().interval &&
         (touch.lanes & ~mine) != 0;
}
void add(Touch& touch) {
  const u32 mine = 1u << self().thread % 32;
  const bool goes_on = touch.warp == own_warp().index && touch.interval == self().interval;
  touch = {self().interval, own_warp().index, goes_on ? touch.lanes | mine : mine};
}

// All calls that led to a place, as one number.
u64 place_of_calls(const void* site, void* const* frame) {
  const auto* stack = static_cast<const unsigned char*>(self().start.uc_stack.ss_sp);
  const unsigned char* end = stack + self().start.uc_stack.ss_size - 2 * sizeof(void*);
  u64 place = reinterpret_cast<u64>(site);
  const auto within = [&] {
    const auto* at = reinterpret_cast<const unsigned char*>(frame);
    return at >= stack && at <= end;
  };
  while (within()) {
    place = place * 0x9E3779B97F4A7C15u + reinterpret_cast<u64>(frame[1]);
    auto* const* outer = reinterpret_cast<void* const*>(frame[0]);
    if (outer <= frame) break;
    frame = outer;
  }
  return place;
}

}  // namespace

void begin_interval() { ++self().interval; }

void touch_read(u32 address, u32 bytes) {
  if (!counts()) return;
  shared_at(address, bytes);
  for (u32 i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    if (by_others(cta->written[i])) {
      fail("no __syncwarp between a write at %u and a read by another lane of the warp", i * 4);
    }
    add(cta->read[i]);
  }
}
void touch_written(u32 address, u32 bytes) {
  if (!counts()) return;
  shared_at(address, bytes);
  for (u32 i = address / 4; i < (address + bytes + 3) / 4; ++i) {
    if (by_others(cta->read[i])) {
      fail("no __syncwarp between a read at %u and a write by another lane of the warp", i * 4);
    }
    add(cta->written[i]);
  }
}

void block_sync(void* const* frame) {
  const u64 place = place_of_calls(__builtin_return_address(0), frame);
  NamedBarrier& barrier = cta->barriers[0];
  if (barrier.arrived == 0) barrier.place = place;
  if (barrier.place != place) fail("threads of a CTA meet at different places of __syncthreads");
  barrier_sync(0, block_size().x);
}

}  // namespace emulator
