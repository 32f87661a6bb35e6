// vLLM's free list: one queue over empty and cached slots alike.
#pragma once

#include "eviction/policy.hpp"
#include "eviction/slot_queue.hpp"

namespace understudy {

// Appends cached slots. Empty ones go to the front as a group, so that the first one of a release is handed out next
// (last in, first out); with `append_empty` (older versions) they are appended too.
class VllmOrder final : public EvictionPolicy {
 public:
  VllmOrder(const PolicySpace& space, bool append_empty)
      : EvictionPolicy(space), slots_(space.slots), queue_(space.slots), append_empty_(append_empty) {
    queue_.push_back_fresh();
  }

  void grow(std::size_t slots) override { queue_.grow(slots); }

  void insert(std::span<const SlotId> slots) override {
    steps_ += slots.size() + queue_.make_room(slots.size());
    // All empty slots are in the first `in_front` ones.
    const std::size_t in_front = queue_.push_back(
        slots, [all = append_empty_](const Slot& slot) { return all || slot.state == SlotState::Inactive; });
    for (std::size_t i = in_front; i > 0; --i) {
      if (slots_[slots[i - 1]].state != SlotState::Inactive) queue_.push_front(slots[i - 1]);
    }
  }
  void give_back(std::span<const SlotId> slots, SlotId first) override {
    steps_ += slots.size() + queue_.make_room(slots.size());
    queue_.push_front_empty(slots, first);
  }
  void remove(SlotId id) override {
    queue_.remove(id);
    ++steps_;
  }
  void remove_cached(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) queue_.remove(id);
    steps_ += slots.size();
  }
  void touch(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) {  // `slots` may name one slot repeatedly
      if (slots_[id].state != SlotState::Inactive) continue;
      queue_.remove(id);
      steps_ += queue_.make_room(1);
      queue_.push_back(id);
    }
    steps_ += slots.size();
  }
  void take(std::span<SlotId> out) override {
    queue_.pop_front(out, fresh_);
    steps_ += out.size();
  }
  std::size_t memory_bytes() const override { return queue_.memory_bytes(); }

 private:
  std::vector<SlotId> list(FreshSlots fresh, std::size_t limit) const override { return queue_.first(limit, fresh); }

  Slot* slots_;
  SlotQueue queue_;
  bool append_empty_;
};

}  // namespace understudy
