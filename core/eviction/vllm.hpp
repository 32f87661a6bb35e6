// vLLM's free list: one queue over empty and cached slots alike.
#pragma once

#include <ranges>

#include "eviction/policy.hpp"

namespace understudy {

// Cached slots are appended. Empty ones go to the front as a group, so that the first of a release is the very next
// to be handed out (last in, first out); with `append_empty` (older versions) they are appended like the rest.
class VllmOrder final : public EvictionPolicy {
 public:
  VllmOrder(const PolicySpace& space, bool append_empty)
      : slots_(space.slots), list_(space.slots, space.sentinels[0]), append_empty_(append_empty) {}

  void insert(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) {
      if (append_empty_ || slots_[id].state == SlotState::Inactive) list_.push_back(id);
    }
    if (!append_empty_) {
      for (const SlotId id : slots | std::views::reverse) {
        if (slots_[id].state != SlotState::Inactive) list_.push_front(id);
      }
    }
    steps_ += slots.size();
  }
  void give_back(std::span<const SlotId> slots) override {
    for (const SlotId id : slots | std::views::reverse) list_.push_front(id);
    steps_ += slots.size();
  }
  void remove(SlotId id) override {
    SlotList::unlink(slots_, id);
    ++steps_;
  }
  void touch(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) {
      if (slots_[id].state != SlotState::Inactive) continue;
      SlotList::unlink(slots_, id);
      list_.push_back(id);
    }
    steps_ += slots.size();
  }
  void take(std::span<SlotId> out) override {
    for (SlotId& id : out) id = list_.pop_front();
    steps_ += out.size();
  }
  std::vector<SlotId> order(std::size_t limit) const override {
    std::vector<SlotId> out;
    for (SlotId id = list_.front(); id != list_.end() && out.size() < limit; id = list_.after(id)) out.push_back(id);
    return out;
  }

 private:
  Slot* slots_;
  SlotList list_;
  bool append_empty_;
};

}  // namespace understudy
