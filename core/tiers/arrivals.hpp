// Blocks on their way to a tier: the host's, or one of the run's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/huge_array.hpp"
#include "links/link.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Somebody who waits for a block to land on a tier: told, with the slot still referenced.
class LandingWaiter {
 public:
  virtual ~LandingWaiter() = default;
  virtual void source_landed(std::uint32_t load, std::uint32_t block, SlotId slot, std::int64_t time_ns) = 0;
};

// A copy under way, or queued. Its slots are claimed in the store of the tier, which knows by hash what is coming.
struct Arrival {
  struct Waiter {
    LandingWaiter* who;
    std::uint32_t load;
    std::uint32_t block;  // of the load
    std::uint32_t place;  // among the slots
  };

  std::int64_t eta_ns = 0;             // about
  std::optional<TransferId> transfer;  // none while it is queued
  std::vector<SlotId> to;
  std::vector<Waiter> waiters;
};

// Those of one tier, by the slots that wait for them.
class Arrivals {
 public:
  using Id = std::uint32_t;

  // To a tier of so many slots.
  explicit Arrivals(std::size_t slots) : by_slot_(slots) {}

  Id expect(std::span<const SlotId> to, std::int64_t eta_ns) {
    if (free_.empty()) {
      free_.push_back(static_cast<Id>(arrivals_.size()));
      arrivals_.emplace_back();
    }
    const Id id = free_.back();
    free_.pop_back();
    Arrival& arrival = arrivals_[id];
    arrival.eta_ns = eta_ns;
    arrival.to.assign(to.begin(), to.end());
    for (const SlotId slot : to) by_slot_[slot] = id;
    slots_ += to.size();
    return id;
  }

  Arrival& at(Id id) noexcept { return arrivals_[id]; }  // stays where it is when others come
  const Arrival& at(Id id) const noexcept { return arrivals_[id]; }
  const Arrival& of(SlotId slot) const noexcept { return arrivals_[by_slot_[slot]]; }  // `slot` is claimed
  void wait_for(SlotId slot, LandingWaiter& who, std::uint32_t load, std::uint32_t block) {
    Arrival& arrival = arrivals_[by_slot_[slot]];
    const auto place = std::ranges::find(arrival.to, slot) - arrival.to.begin();
    arrival.waiters.push_back({&who, load, block, static_cast<std::uint32_t>(place)});
  }
  // It has landed, and everybody has been told. Keeps the memory.
  void forget(Id id) {
    Arrival& arrival = arrivals_[id];
    slots_ -= arrival.to.size();
    arrival.transfer.reset();
    arrival.to.clear();
    arrival.waiters.clear();
    free_.push_back(id);
  }

  std::size_t slots() const noexcept { return slots_; }  // of all that are on their way

 private:
  std::deque<Arrival> arrivals_;
  std::vector<Id> free_;
  HugeArray<Id> by_slot_;  // of those on their way
  std::size_t slots_ = 0;
};

}  // namespace understudy
