// CTAs that have an SM each, some of which get more of the memory than others: who is ahead of the
// mean waits a little at each block, so that all end together, however many blocks each has.
#pragma once

#include "attngen/context.cuh"
#include "attngen/ptx/async_copy.cuh"
#include "attngen/ptx/clock.cuh"
#include "attngen/ptx/math.cuh"
#include "attngen/ptx/matrix_move.cuh"

namespace attngen {

// Of one thread of each CTA, which has kBytes on the way.
template <int kBytes>
class Pace {
 public:
  static constexpr int kLeast = 24;  // blocks of a CTA that waits

  // counter: 16 bytes, in the first 4 of which the CTAs of a launch count what they have read, 2^32
  // in all, so that it ends where it began; nullptr: nobody waits. It only says how long to wait,
  // kWaitMost a block at most: launches that count at once make each other wait wrongly. shared:
  // room for these 16 bytes. blocks: those of this CTA. soon: with so many left it waits kWaitEach
  // cycles for each that it is ahead, and in proportion less before: no copy takes as long as
  // another, and who is ahead now may not be later. turn: CTAs count in turns.
  ATTNGEN_DEVICE Pace(u32* counter, u32 shared, int blocks, int soon, u32 cta, u32 ctas, u32 turn)
      : counter_(counter), shared_(shared), blocks_(blocks), soon_(soon) {
    if (counter == nullptr) return;
    whole_ = ~0u / ctas;
    if (cta == 0) whole_ += ~0u % ctas + 1;
    weight_ = whole_ / max_of(blocks, 1);
    until_ = kFirst + turn % kStride;
    place_ = until_ - kStride;
  }

  // Before each block.
  ATTNGEN_DEVICE void wait() const {
    if (wait_ > 0) wait_cycles(wait_);
  }
  // Behind each block.
  ATTNGEN_DEVICE void count() {
    if (--until_ == 0) turn();
  }
  // Behind the last one.
  ATTNGEN_DEVICE void end() const {
    if (counter_ == nullptr) return;
    atomicAdd(counter_, whole_ - told_);
    await_copies();
  }

 private:
  static constexpr int kFirst = 8;   // blocks before anybody counts, so that all have begun
  static constexpr int kStride = 4;  // blocks that are counted at a time
  static constexpr int kLag = 2;     // blocks until the count is there
  // An eighth of what a copy takes: a third makes all wait, since counts come late.
  static constexpr int kWaitEach = kBytes / 164;
  static constexpr int kWaitMost = 2 * kWaitEach;

  // Counts what will have been read on average until the next turn, and looks at the count, which
  // the thread does not wait for, kLag blocks later.
  ATTNGEN_DEVICE void turn() {
    if (asked_) {
      u32 found[2];
      await_copies();
      load_shared_x2(found, shared_);
      const float ahead = place_ - static_cast<float>(found[0]) * 0x1p-32f * blocks_;
      const float share =
          soon_ * reciprocal_approx(static_cast<float>(max_of(blocks_ - place_, soon_)));
      wait_ = min_of(static_cast<int>(ahead * kWaitEach * share), kWaitMost);
      asked_ = false;
      until_ = kStride - kLag;
      return;
    }
    place_ += kStride;
    const bool more = place_ + kStride < blocks_;
    const u32 told = more ? weight_ * place_ + weight_ * (kStride - 1) / 2 : whole_;
    atomicAdd(counter_, told - told_);
    copy_async<16>(shared_, counter_, true);
    asked_ = told_ > 0 && more;  // with all counted it would begin anew
    told_ = told;
    until_ = asked_ ? kLag : kStride;
  }

  u32* counter_;
  u32 shared_;
  int blocks_;
  int soon_;
  u32 whole_;   // what this CTA counts in all
  u32 weight_;  // of a block
  int until_;   // blocks until the next turn
  int place_;   // blocks at the last count
  u32 told_ = 0;
  int wait_ = 0;
  bool asked_ = false;
};

}  // namespace attngen
