// Slots of a pool that were never used.
#pragma once

#include <cstddef>

#include "base/assert.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Handed out once, in ascending order, and in no list before: a pool costs only what is used of it.
class FreshSlots {
 public:
  FreshSlots() = default;
  FreshSlots(SlotId first, std::size_t count) noexcept : next_(first), end_(first + static_cast<SlotId>(count)) {}

  bool empty() const noexcept { return next_ == end_; }
  std::size_t size() const noexcept { return end_ - next_; }
  SlotId take() noexcept {
    UNDERSTUDY_ASSERT(!empty(), "takes a fresh slot where none is left");
    return next_++;
  }

 private:
  SlotId next_ = 0;
  SlotId end_ = 0;
};

}  // namespace understudy
