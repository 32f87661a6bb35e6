// A double-ended queue of slots that can also lose any one of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/huge_array.hpp"
#include "eviction/fresh_slots.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A ring of slot ids in which Slot::prev is the slot's place. Unlike in a linked list, taking from the front reads
// neighbouring ids, so that a run of slots can be brought in together instead of one after the other. A removed slot
// leaves a hole; a ring that is full of them (it has twice the places it needs) is compacted, at constant cost a push.
// One place may stand for all fresh slots.
class SlotQueue {
 public:
  explicit SlotQueue(Slot* slots) : slots_(slots), ring_(places(0)) {}

  // From now on the queue may hold `slots`.
  void grow(std::size_t slots) {
    if (places(slots) <= ring_.size()) return;
    HugeArray<SlotId> larger(places(slots), HugeArray<SlotId>::Writes::Dense);
    larger.prefer_huge_pages(0, larger.size());
    move_to(larger, 0);
    ring_ = std::move(larger);
  }

  // Makes room for `pushes`; returns the steps it took.
  std::size_t make_room(std::size_t pushes) noexcept {
    const std::size_t used = back_ >= front_ ? back_ - front_ : back_ + ring_.size() - front_;
    // One place always stays free, to tell a full ring from an empty one.
    if (used + pushes < ring_.size()) return 0;
    move_to(ring_, front_);
    return ring_.size();
  }
  void push_back(SlotId id) noexcept {
    put(ring_, back_, id);
    back_ = after(back_);
  }
  // Those of them that `belongs` is true of; returns how many come up to the last of the others.
  template <typename Belongs>
  std::size_t push_back(std::span<const SlotId> ids, Belongs belongs) noexcept {
    Slot* const slots = slots_;  // copies, which stay in registers
    SlotId* const ring = ring_.get();
    const std::size_t end = ring_.size();
    std::size_t back = back_;
    std::size_t others = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const SlotId id = ids[i];
      if (!belongs(slots[id])) {
        others = i + 1;
        continue;
      }
      ring[back] = id;
      slots[id].prev = static_cast<SlotId>(back);
      back = back + 1 == end ? 0 : back + 1;
    }
    back_ = back;
    return others;
  }
  void push_front(SlotId id) noexcept {
    front_ = before(front_);
    put(ring_, front_, id);
  }
  // All of them, the first of them in front, each counted from `first` on. They are empty, and nobody will `remove`
  // them: they are not looked at.
  void push_front_empty(std::span<const SlotId> ids, SlotId first) noexcept {
    const std::size_t before_end = std::min(ids.size(), front_);  // the others come in front of the ring's end
    const std::size_t others = ids.size() - before_end;
    SlotId* to = ring_.get() + (front_ - before_end);
    for (const SlotId id : ids.subspan(others)) *to++ = first + id;
    to = ring_.get() + (ring_.size() - others);
    for (const SlotId id : ids.first(others)) *to++ = first + id;
    front_ = others > 0 ? ring_.size() - others : front_ - before_end;
  }
  // Fresh slots stand here, behind what is in the queue.
  void push_back_fresh() noexcept {
    ring_[back_] = kFresh;
    back_ = after(back_);
  }

  void remove(SlotId id) noexcept { ring_[slots_[id].prev] = kNoSlot; }

  // There must be as many.
  void pop_front(std::span<SlotId> out, FreshSlots& fresh) noexcept {
    const SlotId* const ring = ring_.get();
    const std::size_t end = ring_.size();
    std::size_t at = front_;
    std::size_t i = 0;
    while (i < out.size()) {
      if (i + kTogether <= out.size() && at + kTogether <= end && are_slots(ring + at)) {
        std::copy_n(ring + at, kTogether, out.data() + i);
        i += kTogether;
        at = at + kTogether == end ? 0 : at + kTogether;
        continue;
      }
      const SlotId id = ring[at];
      if (id < kFresh) {
        out[i++] = id;
      } else if (id == kFresh && !fresh.empty()) {
        while (i < out.size() && !fresh.empty()) out[i++] = fresh.take();
        continue;
      }
      at = at + 1 == end ? 0 : at + 1;
    }
    front_ = at;
    // Who asks for one block at a time comes for these next.
    for (std::size_t next = at; next < std::min(at + kNext, end); ++next) {
      if (ring[next] < kFresh) slots_[ring[next]].warm();
    }
  }

  std::vector<SlotId> first(std::size_t limit, FreshSlots fresh) const {
    std::vector<SlotId> out;
    for (std::size_t at = front_; at != back_ && out.size() < limit; at = after(at)) {
      if (ring_[at] == kFresh) {
        while (out.size() < limit && !fresh.empty()) out.push_back(fresh.take());
      } else if (ring_[at] != kNoSlot) {
        out.push_back(ring_[at]);
      }
    }
    return out;
  }

  std::size_t memory_bytes() const noexcept { return ring_.size() * sizeof(SlotId); }

 private:
  static constexpr SlotId kFresh = kNoSlot - 1;
  static constexpr std::size_t kNext = 4;
  static constexpr std::size_t kTogether = 8;

  // Whether so many places from here on have neither holes nor fresh ones.
  static bool are_slots(const SlotId* places) noexcept {
    SlotId last = 0;
    for (std::size_t i = 0; i < kTogether; ++i) last = std::max(last, places[i]);
    return last < kFresh;
  }

  static std::size_t places(std::size_t slots) noexcept { return 2 * slots + 4; }
  std::size_t after(std::size_t at) const noexcept { return at + 1 == ring_.size() ? 0 : at + 1; }
  std::size_t before(std::size_t at) const noexcept { return at == 0 ? ring_.size() - 1 : at - 1; }
  void put(HugeArray<SlotId>& ring, std::size_t at, SlotId id) noexcept {
    ring[at] = id;
    slots_[id].prev = static_cast<SlotId>(at);
  }

  // Without holes, from place `to` of `ring` on: this one (then that is the front), or another that is empty.
  void move_to(HugeArray<SlotId>& ring, std::size_t to) noexcept {
    const std::size_t front = to;
    for (std::size_t at = front_; at != back_; at = after(at)) {
      const SlotId id = ring_[at];
      if (id == kNoSlot) continue;
      if (id == kFresh) {
        ring[to] = kFresh;
      } else {
        put(ring, to, id);
      }
      to = to + 1 == ring.size() ? 0 : to + 1;
    }
    front_ = front;
    back_ = to;
  }

  Slot* slots_;
  HugeArray<SlotId> ring_;
  std::size_t front_ = 0;  // the ring's content is [front_, back_), holes included
  std::size_t back_ = 0;
};

}  // namespace understudy
