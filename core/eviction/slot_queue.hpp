// A double-ended queue of slots from which any slot can be removed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "base/huge_array.hpp"
#include "eviction/fresh_slots.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A ring of slot ids in which Slot::prev is the slot's position. Unlike a linked list, popping reads neighbouring ids,
// so the slots of a run are loaded together. A removed slot leaves a hole; a ring full of holes (it has twice the
// places it needs) is compacted, at amortised constant cost. One place may represent all fresh slots.
class SlotQueue {
 public:
  explicit SlotQueue(Slot* slots) : slots_(slots), ring_(places(0)) {}

  // Prepares for `slots` slots in the queue.
  void grow(std::size_t slots) {
    if (places(slots) <= ring_.size()) return;
    HugeArray<SlotId> larger(places(slots), HugeArray<SlotId>::Writes::Dense);
    larger.prefer_huge_pages(0, larger.size());
    move_to(larger, 0);
    ring_ = std::move(larger);
  }

  // Makes room for `pushes`; returns the number of steps.
  std::size_t make_room(std::size_t pushes) noexcept {
    const std::size_t used = back_ >= front_ ? back_ - front_ : back_ + ring_.size() - front_;
    // One place stays free, to distinguish a full ring from an empty one.
    if (used + pushes < ring_.size()) return 0;
    move_to(ring_, front_);
    return ring_.size();
  }
  void push_back(SlotId id) noexcept {
    UNDERSTUDY_ASSERT(after(back_) != front_, "pushes to a full queue");
    put(ring_, back_, id);
    back_ = after(back_);
  }
  // Pushes the ids for which `belongs` is true; returns the length of the prefix that contains all others.
  template <typename Belongs>
  std::size_t push_back(std::span<const SlotId> ids, Belongs belongs) noexcept {
    Slot* const slots = slots_;  // local copies stay in registers
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
  // Pushes empty slots (relative to `first`), ids[0] in front. Never `remove`d, so their positions are not recorded.
  void push_front_empty(std::span<const SlotId> ids, SlotId first) noexcept {
    const std::size_t before_end = std::min(ids.size(), front_);  // the others go before the ring's end
    const std::size_t others = ids.size() - before_end;
    SlotId* to = ring_.get() + (front_ - before_end);
    for (const SlotId id : ids.subspan(others)) *to++ = first + id;
    to = ring_.get() + (ring_.size() - others);
    for (const SlotId id : ids.first(others)) *to++ = first + id;
    front_ = others > 0 ? ring_.size() - others : front_ - before_end;
  }
  // Places all fresh slots at the back of the queue.
  void push_back_fresh() noexcept {
    ring_[back_] = kFresh;
    back_ = after(back_);
  }

  void remove(SlotId id) noexcept {
    UNDERSTUDY_ASSERT(slots_[id].prev < ring_.size() && ring_[slots_[id].prev] == id,
                      "removes a slot not in the queue");
    ring_[slots_[id].prev] = kNoSlot;
  }

  // Pops out.size() slots; the queue must have as many.
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
      UNDERSTUDY_ASSERT(at != back_, "pops more slots than the queue has");
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
    // Prefetches for a caller that asks for one block at a time.
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

  // True if the next kTogether places have neither holes nor fresh slots.
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

  // Moves the content without holes to `ring` from place `to` on: this ring (then `to` is front_) or an empty one.
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
