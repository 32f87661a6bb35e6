// Sleep of an engine between two steps: nothing can be computed before a transfer ends.
#pragma once

#include <cstdint>

namespace understudy {

struct Nap {
  bool on = false;
  bool polls = false;          // its loop wakes up at times of its own; else when a transfer lands
  bool due = false;            // something has changed since it fell asleep
  std::uint64_t released = 0;  // blocks that the tiers had released by then
};

}  // namespace understudy
