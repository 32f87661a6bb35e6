// An eviction policy of the kind that users write in Python.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "eviction/policy.hpp"

namespace understudy {

// Least recently freed first, outside the store's lock.
class QueueAdvisor final : public PolicyAdvisor {
 public:
  void observe(std::span<const PolicyChange> changes, std::size_t& observed) override {
    for (const PolicyChange& change : changes) {
      std::erase(order_, change.slot);
      if (change.freed) order_.push_back(change.slot);
      ++observed;
    }
  }
  std::vector<SlotId> select(std::size_t count) override {
    return {order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count)};
  }

 private:
  std::deque<SlotId> order_;
};

}  // namespace understudy
