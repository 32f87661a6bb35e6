// Blocks on their way to a tier: the host, or a tier that the run shares.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/assert.hpp"
#include "base/huge_array.hpp"
#include "links/link.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Notified when a block that it waits for lands on a tier, while the slot is still referenced.
class LandingWaiter {
 public:
  virtual ~LandingWaiter() = default;
  virtual void source_landed(std::uint32_t load, std::uint32_t block, SlotId slot, std::int64_t time_ns) = 0;
};

// A copy in flight or queued. Its slots are claimed in the store of the tier, which finds them by hash.
struct Arrival {
  struct Waiter {
    LandingWaiter* owner;
    std::uint32_t load;
    std::uint32_t block;  // index in the load
    std::uint32_t place;  // index in `to`
  };
  static constexpr std::uint32_t kIndexed = 0xFFFFFFFFu;

  std::int64_t since_ns = 0;
  std::uint64_t bytes = 0;
  std::uint64_t concurrent = 0;        // other copies of the worker on this link at the start
  std::optional<TransferId> transfer;  // none while queued
  std::vector<SlotId> from;            // on the tier above
  std::vector<SlotId> to;
  std::vector<Waiter> waiters;
  std::uint32_t place_unindexed = kIndexed;  // index among the arrivals that are not in by_slot_ yet
};

// Arrivals on one tier; `Kind` is an Arrival.
template <class Kind>
class ArrivalsOf {
 public:
  using Id = std::uint32_t;

  // For a tier of `slots` slots.
  explicit ArrivalsOf(std::size_t slots) : by_slot_(slots) {}

  Id expect(std::span<const SlotId> to) {
    if (free_.empty()) {
      free_.push_back(static_cast<Id>(arrivals_.size()));
      arrivals_.push_back(std::make_unique<Kind>());
    }
    const Id id = free_.back();
    free_.pop_back();
    Kind& arrival = *arrivals_[id];
    arrival.to.assign(to.begin(), to.end());
    arrival.place_unindexed = static_cast<std::uint32_t>(unindexed_.size());
    unindexed_.push_back(id);
    slots_ += to.size();
    return id;
  }

  Kind& at(Id id) noexcept { return *arrivals_[id]; }  // stable address
  const Kind& at(Id id) const noexcept { return *arrivals_[id]; }
  // All arrivals, and unused ones whose memory is kept.
  std::span<const std::unique_ptr<Kind>> all() const noexcept { return arrivals_; }
  const Kind& of(SlotId slot) const { return *arrivals_[id_of(slot)]; }  // `slot` must be claimed
  void wait_for(SlotId slot, LandingWaiter& owner, std::uint32_t load, std::uint32_t block) {
    Kind& arrival = *arrivals_[id_of(slot)];
    const auto place = std::ranges::find(arrival.to, slot) - arrival.to.begin();
    UNDERSTUDY_ASSERT(place < std::ssize(arrival.to), "waits for a slot that nothing arrives in");
    arrival.waiters.push_back({&owner, load, block, static_cast<std::uint32_t>(place)});
  }
  // Removes a landed arrival whose waiters were notified. Keeps the memory.
  void forget(Id id) {
    Kind& arrival = *arrivals_[id];
    UNDERSTUDY_ASSERT(slots_ >= arrival.to.size() && !arrival.to.empty(), "forgets an arrival twice");
    slots_ -= arrival.to.size();
    if (arrival.place_unindexed != Arrival::kIndexed) {
      const Id last = unindexed_.back();
      unindexed_[arrival.place_unindexed] = last;
      arrivals_[last]->place_unindexed = arrival.place_unindexed;
      unindexed_.pop_back();
    }
    arrival.transfer.reset();
    arrival.waiters.clear();
    free_.push_back(id);
  }

  std::size_t slots() const noexcept { return slots_; }  // of all arrivals

 private:
  // Indexes lazily: lookups are rare, and most arrivals are gone before one.
  Id id_of(SlotId slot) const {
    for (const Id id : unindexed_) {
      arrivals_[id]->place_unindexed = Arrival::kIndexed;
      for (const SlotId one : arrivals_[id]->to) by_slot_[one] = id;
    }
    unindexed_.clear();
    return by_slot_[slot];
  }

  std::vector<std::unique_ptr<Kind>> arrivals_;
  std::vector<Id> free_;
  mutable std::vector<Id> unindexed_;
  mutable HugeArray<Id> by_slot_;  // of arrivals, except the unindexed ones
  std::size_t slots_ = 0;
};
using Arrivals = ArrivalsOf<Arrival>;

}  // namespace understudy
