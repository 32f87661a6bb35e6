// Slots of a pool that nobody has used yet.
#pragma once

#include <cstddef>

#include "slots/slot.hpp"

namespace understudy {

// They go in ascending order, each once, and are in no list before: a pool costs what is used of it.
class FreshSlots {
 public:
  FreshSlots() = default;
  FreshSlots(SlotId first, std::size_t count) noexcept : next_(first), end_(first + static_cast<SlotId>(count)) {}

  bool empty() const noexcept { return next_ == end_; }
  std::size_t size() const noexcept { return end_ - next_; }
  SlotId take() noexcept { return next_++; }

 private:
  SlotId next_ = 0;
  SlotId end_ = 0;
};

}  // namespace understudy
