// Limits of plays that run in lanes: which of them prepare, for how long the others run, and how long they may idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "replay/event_queue.hpp"

namespace understudy {

struct PlayLimits {
  std::uint32_t preparing_plays = 0;  // the first ones, all at once; the others start when all of these have ended
  std::int64_t duration_ns = 0;       // from then on: later no play starts and no request arrives; 0: no limit
  std::int64_t grace_ns = 0;          // requests that run then are cancelled so much later
  std::int64_t play_idle_ns = 0;      // longest time in which no request of a play runs; 0: no limit
  std::int64_t fleet_idle_ns = 0;     // the same of all plays together

  bool caps_idle() const noexcept { return play_idle_ns > 0 || fleet_idle_ns > 0; }
};

// Where a run of such plays is.
struct PlayClock {
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  struct Arrival {
    std::int64_t time_ns = 0;
    EventQueue::Handle handle = EventQueue::kNone;
  };

  std::size_t preparing = 0;             // plays that have not ended
  std::int64_t begin_ns = -1;            // when the preparation ended
  std::int64_t end_ns = kNever;          // of the duration
  std::size_t idle_lanes = 0;            // lanes for which no play was left before the end
  std::map<std::uint64_t, Arrival> due;  // by row, if idle time is capped
  std::set<std::size_t> running_plays;   // the same
  std::vector<std::uint32_t> in_flight;  // by play: requests that have arrived and not ended
  std::size_t total_in_flight = 0;
};

}  // namespace understudy
