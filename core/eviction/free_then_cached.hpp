// Policies that hand out empty slots first (fresh ones, then used ones, oldest first) and then evict cached ones.
#pragma once

#include <algorithm>
#include <utility>

#include "eviction/policy.hpp"

namespace understudy {

// `Cached` owns the order of the cached slots: insert(id), remove(id), touch(id), pop(out), append_order(out, limit),
// memory_bytes(), a public `steps` counter; optionally grow(slots), make_room(count), insert_cached(slots),
// warm(slots), warm_parents(slots).
template <typename Cached>
class FreeThenCached final : public EvictionPolicy {
 public:
  FreeThenCached(const PolicySpace& space, Cached cached)
      : EvictionPolicy(space),
        slots_(space.slots),
        free_(space.slots, space.sentinels[0]),
        cached_(std::move(cached)) {}

  void grow(std::size_t slots) override {
    if constexpr (requires { cached_.grow(slots); }) cached_.grow(slots);
  }

  void insert(std::span<const SlotId> slots) override {
    if constexpr (requires { cached_.make_room(slots.size()); }) cached_.make_room(slots.size());
    if constexpr (requires { cached_.insert_cached(slots); }) {
      const std::size_t others = cached_.insert_cached(slots);
      for (const SlotId id : slots.first(others)) {
        if (slots_[id].state != SlotState::Inactive) free_.push_back(id);
      }
      count(slots.size());
      return;
    }
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if constexpr (requires { cached_.warm_parents(slots); }) {
        if (i % 16 == 0) cached_.warm_parents(slots.subspan(i, std::min<std::size_t>(16, slots.size() - i)));
      }
      const SlotId id = slots[i];
      if (slots_[id].state == SlotState::Inactive) {
        cached_.insert(id);
      } else {
        free_.push_back(id);
      }
    }
    count(slots.size());
  }

  void remove(SlotId id) override {
    if (slots_[id].state == SlotState::Inactive) {
      cached_.remove(id);
    } else {
      SlotList::unlink(slots_, id);
    }
    count(1);
  }

  void remove_cached(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) cached_.remove(id);
    count(slots.size());
  }

  void warm(std::span<const SlotId> slots) const override {
    if constexpr (requires { cached_.warm(slots); }) cached_.warm(slots);
  }

  void touch(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) {
      if (slots_[id].state == SlotState::Inactive) cached_.touch(id);
    }
    count(slots.size());
  }

  void take(std::span<SlotId> out) override {
    std::size_t i = 0;
    for (; i < out.size() && !fresh_.empty(); ++i) out[i] = fresh_.take();
    for (; i < out.size() && !free_.empty(); ++i) out[i] = free_.pop_front();
    if (i < out.size()) cached_.pop(out.subspan(i));
    count(out.size());
  }

  std::size_t memory_bytes() const override { return cached_.memory_bytes(); }

 private:
  std::vector<SlotId> list(FreshSlots fresh, std::size_t limit) const override {
    std::vector<SlotId> out;
    while (!fresh.empty() && out.size() < limit) out.push_back(fresh.take());
    for (SlotId id = free_.front(); id != free_.end() && out.size() < limit; id = free_.after(id)) out.push_back(id);
    cached_.append_order(out, limit);
    return out;
  }

  void count(std::size_t n) {
    steps_ += n + cached_.steps;
    cached_.steps = 0;
  }

  Slot* slots_;
  SlotList free_;
  Cached cached_;
};

}  // namespace understudy
