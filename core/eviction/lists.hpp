// List orders of cached slots: LRU, FIFO and multi-level LRU.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "eviction/frequency_sketch.hpp"
#include "eviction/policy.hpp"
#include "eviction/slot_queue.hpp"

namespace understudy {

// Least recently released first. A touch refreshes a slot when `kRefresh` is set (LRU); without it this is FIFO.
template <bool kRefresh>
class ListOrder {
 public:
  explicit ListOrder(const PolicySpace& space) : queue_(space.slots) {}

  void grow(std::size_t slots) { queue_.grow(slots); }

  void make_room(std::size_t count) noexcept { steps += queue_.make_room(count); }
  void insert(SlotId id) noexcept { queue_.push_back(id); }
  // Inserts the cached ones; returns the length of the prefix that contains all others.
  std::size_t insert_cached(std::span<const SlotId> slots) noexcept {
    return queue_.push_back(slots, [](const Slot& slot) { return slot.state == SlotState::Inactive; });
  }
  void remove(SlotId id) noexcept { queue_.remove(id); }
  void touch(SlotId id) noexcept {
    if constexpr (kRefresh) {
      remove(id);
      make_room(1);
      insert(id);
    }
  }
  void pop(std::span<SlotId> out) noexcept {
    FreshSlots none;
    queue_.pop_front(out, none);
  }
  void append_order(std::vector<SlotId>& out, std::size_t limit) const {
    const std::vector<SlotId> order = queue_.first(limit - std::min(limit, out.size()), {});
    out.insert(out.end(), order.begin(), order.end());
  }
  std::size_t memory_bytes() const noexcept { return queue_.memory_bytes(); }

  std::uint64_t steps = 0;

 private:
  SlotQueue queue_;
};

// Four LRU lists. A slot's level is fixed when it becomes unreferenced, by the use count of its hash.
class MultiLruOrder {
 public:
  MultiLruOrder(const PolicySpace& space, std::array<std::uint32_t, 3> thresholds)
      : slots_(space.slots),
        sketch_(space.sketch),
        thresholds_(thresholds),
        levels_{SlotList(space.slots, space.sentinels[1]), SlotList(space.slots, space.sentinels[2]),
                SlotList(space.slots, space.sentinels[3]), SlotList(space.slots, space.sentinels[4])} {}

  void insert(SlotId id) noexcept {
    const unsigned uses = sketch_->estimate(slots_[id].lineage);
    std::size_t level = 0;
    while (level < thresholds_.size() && uses >= thresholds_[level]) ++level;
    levels_[level].push_back(id);
  }
  void remove(SlotId id) noexcept { SlotList::unlink(slots_, id); }
  void touch(SlotId id) noexcept {
    remove(id);
    insert(id);
  }
  void pop(std::span<SlotId> out) noexcept {
    std::size_t level = 0;
    for (SlotId& id : out) {
      while (levels_[level].empty()) ++level;
      id = levels_[level].pop_front();
    }
  }
  void append_order(std::vector<SlotId>& out, std::size_t limit) const {
    for (const SlotList& list : levels_) {
      for (SlotId id = list.front(); id != list.end() && out.size() < limit; id = list.after(id)) out.push_back(id);
    }
  }
  std::size_t memory_bytes() const noexcept { return 0; }

  std::uint64_t steps = 0;

 private:
  Slot* slots_;
  const FrequencySketch* sketch_;
  std::array<std::uint32_t, 3> thresholds_;
  std::array<SlotList, 4> levels_;
};

}  // namespace understudy
