// A double-ended queue of slots that can also lose any one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_array.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A ring of slot ids in which Slot::prev is the slot's place. Unlike in a linked list, taking from the front reads
// neighbouring ids, so that a run of slots can be brought in together instead of one after the other. A removed slot
// leaves a hole; a ring that is full of them (it has twice the places it needs) is compacted, at constant cost a push.
class SlotQueue {
 public:
  SlotQueue(Slot* slots, std::size_t count) : slots_(slots), ring_(2 * count + 2) {}

  // Makes room for `pushes`; returns the steps it took.
  std::size_t make_room(std::size_t pushes) noexcept {
    const std::size_t used = back_ >= front_ ? back_ - front_ : back_ + ring_.size() - front_;
    // One place always stays free, to tell a full ring from an empty one.
    return used + pushes < ring_.size() ? 0 : compact();
  }
  void push_back(SlotId id) noexcept {
    put(back_, id);
    back_ = after(back_);
  }
  void push_front(SlotId id) noexcept {
    front_ = before(front_);
    put(front_, id);
  }

  void remove(SlotId id) noexcept { ring_[slots_[id].prev] = kNoSlot; }

  // There must be as many.
  void pop_front(std::span<SlotId> out) noexcept {
    const SlotId* const ring = ring_.get();
    const std::size_t end = ring_.size();
    std::size_t at = front_;
    for (SlotId& id : out) {
      do {
        id = ring[at];
        at = at + 1 == end ? 0 : at + 1;
      } while (id == kNoSlot);
    }
    front_ = at;
  }

  std::vector<SlotId> first(std::size_t limit) const {
    std::vector<SlotId> out;
    for (std::size_t at = front_; at != back_ && out.size() < limit; at = after(at)) {
      if (ring_[at] != kNoSlot) out.push_back(ring_[at]);
    }
    return out;
  }

  std::size_t memory_bytes() const noexcept { return ring_.size() * sizeof(SlotId); }

 private:
  std::size_t after(std::size_t at) const noexcept { return at + 1 == ring_.size() ? 0 : at + 1; }
  std::size_t before(std::size_t at) const noexcept { return at == 0 ? ring_.size() - 1 : at - 1; }
  void put(std::size_t at, SlotId id) noexcept {
    ring_[at] = id;
    slots_[id].prev = static_cast<SlotId>(at);
  }

  std::size_t compact() noexcept {
    std::size_t to = front_;
    for (std::size_t at = front_; at != back_; at = after(at)) {
      const SlotId id = ring_[at];
      if (id == kNoSlot) continue;
      put(to, id);
      to = after(to);
    }
    back_ = to;
    return ring_.size();
  }

  Slot* slots_;
  HugeArray<SlotId> ring_;
  std::size_t front_ = 0;  // the ring's content is [front_, back_), holes included
  std::size_t back_ = 0;
};

}  // namespace understudy
