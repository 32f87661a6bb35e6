// State of a run whose workers join and leave.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/assert.hpp"
#include "engine/engine.hpp"
#include "replay/elastic.hpp"
#include "replay/event_faults.hpp"
#include "replay/faults.hpp"
#include "replay/step_meter.hpp"

namespace understudy {

// What a request did on workers that it has lost, if it goes on with its tokens.
struct EarlierAttempts {
  RequestRecord record;            // of all of them together
  std::vector<std::int64_t> gaps;  // between their tokens
};

// A request that a worker had to give up, and the gaps between its tokens if it goes on with them.
struct LostRequest {
  RequestRecord record;
  std::vector<std::int64_t> gaps;
};

// An engine that has crashed, until its transfers over shared links have ended.
struct Wreck {
  std::size_t worker = 0;
  std::unique_ptr<Engine> engine;
  bool is_counted = false;  // its results are among the columns
};

struct Lives {
  explicit Lives(std::size_t num_rows) : emitted(num_rows, 0) {}

  std::vector<LifeState> state;                  // by worker
  std::vector<std::vector<std::uint64_t>> rows;  // by worker: sent to it and not ended, in that order
  std::vector<std::uint32_t> emitted;            // tokens of each row so far
  std::vector<LifeEvent> events;
  std::vector<std::size_t> draining;
  std::vector<std::uint64_t> stranded;  // rows that wait for a worker to be ready
  TrafficWindow traffic;
  std::uint64_t vain_ticks = 0;  // in a row, with nothing else to happen in the run
  StepMeter meter;
  std::vector<SentRequest> sent;  // scratch

  // Faults.
  std::vector<std::size_t> active_faults;    // that last, in the order of their begins
  std::vector<std::int64_t> fault_began_ns;  // by number; -1: it found nothing to fail, as is the next
  std::vector<std::int64_t> fault_ended_ns;
  std::optional<EventFaults> disturber;  // with faults of events and a router that receives them
  std::vector<RequestLoss> losses;
  std::unordered_map<std::uint64_t, std::uint32_t> lost_times;  // by row
  std::unordered_map<std::uint64_t, EarlierAttempts> carried;   // by row, until it ends
  std::vector<Wreck> wrecks;
  std::optional<RequestLoss> last_crash;  // its worker and fault
  // What faults that last have set in a worker's engine.
  struct Disturbed {
    double slowdown = 1;
    std::array<double, 4> shares{1, 1, 1, 1};  // of bandwidth, by tier
    std::array<double, 4> failures{};          // of loads, by tier
  };
  std::vector<Disturbed> disturbed;  // by worker

  void place(std::uint64_t row, std::size_t worker) { rows[worker].push_back(row); }
  void end(std::uint64_t row, std::size_t worker) {
    const auto at = std::ranges::find(rows[worker], row);
    UNDERSTUDY_ASSERT(at != rows[worker].end(), "a request ends on the worker that it was sent to");
    rows[worker].erase(at);
  }
};

}  // namespace understudy
