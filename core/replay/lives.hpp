// State of a run whose workers join and leave.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/assert.hpp"
#include "engine/step_view.hpp"
#include "replay/elastic.hpp"

namespace understudy {

struct Lives {
  explicit Lives(std::size_t num_rows) : emitted(num_rows, 0), scheduled_at(num_rows, 0) {}

  std::vector<LifeState> state;                  // by worker
  std::vector<std::vector<std::uint64_t>> rows;  // by worker: sent to it and not ended, in that order
  std::vector<std::uint32_t> emitted;            // tokens of each row so far
  std::vector<LifeEvent> events;
  std::vector<std::size_t> draining;
  std::vector<std::uint64_t> stranded;  // rows that wait for a worker to be ready
  TrafficWindow traffic;
  std::uint64_t ticks = 0;
  std::vector<std::uint64_t> scheduled_at;  // tick at which a row was last seen in a step
  std::uint64_t vain_ticks = 0;             // in a row, with nothing else to happen in the run
  StepView view;                            // scratch

  void place(std::uint64_t row, std::size_t worker) { rows[worker].push_back(row); }
  void end(std::uint64_t row, std::size_t worker) {
    const auto at = std::ranges::find(rows[worker], row);
    UNDERSTUDY_ASSERT(at != rows[worker].end(), "a request ends on the worker that it was sent to");
    rows[worker].erase(at);
  }
};

}  // namespace understudy
