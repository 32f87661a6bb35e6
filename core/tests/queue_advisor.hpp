// A policy as somebody would write it in Python.
#pragma once

#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "eviction/policy.hpp"

namespace understudy {

// Least recently freed first, outside the store's lock: what a policy written in Python does.
class QueueAdvisor final : public PolicyAdvisor {
 public:
  void observe(std::span<const PolicyChange> changes, std::size_t& learnt) override {
    for (const PolicyChange& change : changes) {
      std::erase(order_, change.slot);
      if (change.freed) order_.push_back(change.slot);
      ++learnt;
    }
  }
  std::vector<SlotId> select(std::size_t count) override {
    return {order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count)};
  }

 private:
  std::deque<SlotId> order_;
};

}  // namespace understudy
