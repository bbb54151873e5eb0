// Copies that run beside the threads that start them.
#include <algorithm>

#include "machine.hpp"

namespace emulator {
namespace {

// What cuTensorMapEncodeTiled was given.
struct Map {
  u64 address;
  u64 sizes[5];
  u64 strides[4];  // bytes
  u32 box[5];
  unsigned char rank, element_bytes, is_bf16;
};
using Place = std::vector<int>;

Map map_at(const void* pointer, size_t rank, u32 shared_address) {
  Map map;
  std::memcpy(&map, pointer, sizeof(map));
  if (map.rank != rank) fail("a copy in %zu dimensions by a map of %u", rank, map.rank);
  if (map.box[0] * map.element_bytes != 128) fail("a box whose rows are not of 128 bytes");
  if (shared_address % 128 != 0) fail("a box at %u", shared_address);
  return map;
}
u32 bytes_of(const Map& map) {
  u32 bytes = map.element_bytes;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// Calls move(address in global memory, offset in the box, bytes that are inside the tensor) for
// each 16 bytes of a box.
template <class Move>
void each_piece(const Map& map, const Place& at, Move move) {
  u32 index[5] = {};
  for (u32 offset = 0; offset < bytes_of(map); offset += 16) {
    u64 address = map.address;
    long long inside = 16;
    for (int i = 0; i < map.rank; ++i) {
      const long long place = static_cast<long long>(at[i]) + index[i];
      const long long left = static_cast<long long>(map.sizes[i]) - place;
      if (place < 0 || left <= 0) inside = 0;
      if (i == 0) inside = std::min(inside, std::max(left, 0LL) * map.element_bytes);
      address += static_cast<u64>(place) * (i == 0 ? map.element_bytes : map.strides[i - 1]);
    }
    move(address, offset, static_cast<u32>(inside));
    index[0] += 16 / map.element_bytes;
    for (int i = 0; i + 1 < map.rank && index[i] == map.box[i]; ++i) {
      index[i] = 0;
      ++index[i + 1];
    }
  }
}

// What a copy in flight will write is nobody's to read: NaN, until it arrives.
void poison(u32 address, u32 bytes) { std::memset(shared_at(address, bytes), 0xff, bytes); }

void start_copy(Action copy) {
  if (late()) {
    cta->copies.push_back(std::move(copy));
  } else {
    copy();
  }
}

void check_bulk(const void* global, u32 shared_address, u32 bytes) {
  if (bytes % 16 != 0 || shared_address % 16 != 0 || reinterpret_cast<u64>(global) % 16 != 0) {
    fail("a bulk copy of %u bytes between %p and %u", bytes, global, shared_address);
  }
}

// A store has two halves, of which a thread can await the first alone: what `read` returns writes.
void start_store(std::function<Action()> read) {
  Fiber& fiber = self();
  fiber.stores.push_back([&fiber, read = std::move(read)] {
    Action write = read();
    if (late()) {
      fiber.unwritten.push_back(std::move(write));
    } else {
      write();
    }
  });
}
// One of a box: put(map, address, what is in shared memory, bytes that are inside the tensor) for
// each 16 bytes.
template <class Put>
void start_box(const void* map_address, u32 source, std::initializer_list<int> at, Put put) {
  const Map map = map_at(map_address, at.size(), source);
  shared_at(source, bytes_of(map));
  start_store([map, source, put, place = Place(at)]() -> Action {
    std::vector<unsigned char> box(bytes_of(map));
    each_piece(map, place, [&](u64, u32 offset, u32 inside) {
      std::memcpy(&box[offset], read_async(swizzled(source + offset), 16), inside);
    });
    return [map, place, put, box = std::move(box)] {
      each_piece(map, place, [&](u64 address, u32 offset, u32 inside) {
        if (inside != 0) put(map, reinterpret_cast<void*>(address), &box[offset], inside);
      });
    };
  });
}
void read_oldest(Fiber& fiber) {
  const std::vector<Action> group = std::move(fiber.groups.front());
  fiber.groups.pop_front();
  for (const Action& store : group) store();
}

}  // namespace

// ---- by threads
void copy_async(u32 destination, const void* source, u32 bytes, u32 present) {
  const bool aligned = reinterpret_cast<u64>(source) % bytes == 0;
  if (present != 0 && (present != bytes || !aligned)) {
    fail("a copy of %u bytes from %p, %u of them there", bytes, source, present);
  }
  touch_written(destination, bytes);
  Action copy = [=, thread = self().thread] {
    unsigned char* to = shared_at(destination, bytes);
    std::memset(to, 0, bytes);
    std::memcpy(to, source, present);
    note_write(destination, bytes, thread);
  };
  poison(destination, bytes);
  if (late()) {
    self().copies.push_back(std::move(copy));
  } else {
    copy();
  }
}
void commit_copies() { self().copy_groups.push_back(std::move(self().copies)); }
void await_copy_groups(u32 pending) {
  auto& groups = self().copy_groups;
  for (; groups.size() > pending; groups.pop_front()) {
    for (Action& copy : groups.front()) copy();
  }
}
void await_copies() {
  await_copy_groups(0);
  for (Action& copy : self().copies) copy();
  self().copies.clear();
}
void arrive_after_copies(u32 barrier) {
  start_copy([copies = std::move(self().copies), barrier] {
    for (const Action& copy : copies) copy();
    mbarrier_arrive(barrier);
  });
  self().copies.clear();
}

// ---- by the copy engine
void tensor_load(u32 destination, const void* map_address, u32 barrier,
                 std::initializer_list<int> at) {
  const Map map = map_at(map_address, at.size(), destination);
  check_visible(barrier);
  poison(destination, bytes_of(map));
  start_copy([map, destination, barrier, place = Place(at)] {
    each_piece(map, place, [&](u64 address, u32 offset, u32 inside) {
      unsigned char* to = write_async(swizzled(destination + offset), 16);
      std::memset(to, 0, 16);
      if (inside != 0) std::memcpy(to, reinterpret_cast<const void*>(address), inside);
    });
    deliver(barrier, bytes_of(map));
  });
}
void tensor_load_both(u32 destination, const void* map_address, u32 barrier,
                      std::initializer_list<int> at) {
  const Map map = map_at(map_address, at.size(), destination);
  check_visible(barrier);
  shared_at(destination, bytes_of(map));
  for (u32 rank = 0; rank < 2; ++rank) {
    std::memset(neighbour(rank).shared + destination, 0xff, bytes_of(map));
    start_copy([map, destination, barrier, rank, place = Place(at)] {
      each_piece(map, place, [&](u64 address, u32 offset, u32 inside) {
        unsigned char* to = write_async_at(rank, swizzled(destination + offset));
        std::memset(to, 0, 16);
        if (inside != 0) std::memcpy(to, reinterpret_cast<const void*>(address), inside);
      });
      deliver_at(rank, barrier, bytes_of(map));
    });
  }
}
void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  check_bulk(source, destination, bytes);
  check_visible(barrier);
  poison(destination, bytes);
  start_copy([=] {
    std::memcpy(write_async(destination, bytes), source, bytes);
    deliver(barrier, bytes);
  });
}
void tensor_store(const void* map_address, u32 source, std::initializer_list<int> at) {
  start_box(map_address, source, at,
            [](const Map&, void* to, const unsigned char* from, u32 inside) {
              std::memcpy(to, from, inside);
            });
}
void tensor_add(const void* map_address, u32 source, std::initializer_list<int> at) {
  start_box(map_address, source, at,
            [](const Map& map, void* to, const unsigned char* from, u32 inside) {
              const Format format = map.is_bf16 ? Format::kBf16 : Format::kFp16;
              for (u32 i = 0; i < inside; i += 2) {
                unsigned short sum, part;
                std::memcpy(&sum, static_cast<unsigned char*>(to) + i, 2);
                std::memcpy(&part, from + i, 2);
                sum = static_cast<unsigned short>(
                    encode(format, decode(format, sum) + decode(format, part)));
                std::memcpy(static_cast<unsigned char*>(to) + i, &sum, 2);
              }
            });
}
void bulk_store(void* destination, u32 source, u32 bytes) {
  check_bulk(destination, source, bytes);
  start_store([=]() -> Action {
    const unsigned char* from = read_async(source, bytes);
    return [destination, data = std::vector<unsigned char>(from, from + bytes)] {
      std::memcpy(destination, data.data(), data.size());
    };
  });
}
void bulk_add(void* destination, u32 source, u32 bytes) {
  check_bulk(destination, source, bytes);
  start_store([=]() -> Action {
    const auto* from = reinterpret_cast<const float*>(read_async(source, bytes));
    return [destination, data = std::vector<float>(from, from + bytes / 4)] {
      for (size_t i = 0; i < data.size(); ++i) static_cast<float*>(destination)[i] += data[i];
    };
  });
}
void bulk_commit() {
  Fiber& fiber = self();
  fiber.groups.push_back(std::move(fiber.stores));
  fiber.stores.clear();
  while (!fiber.groups.empty() && !late()) read_oldest(fiber);
}
void bulk_wait_read(u32 pending) {
  while (self().groups.size() > pending) read_oldest(self());
}
void bulk_wait() {
  bulk_wait_read(0);
  for (const Action& write : self().unwritten) write();
  self().unwritten.clear();
}

}  // namespace emulator
