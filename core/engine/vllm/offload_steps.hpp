// A worker without a clock: a transfer takes a number of steps. Recordings of the scheduler were made with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "engine/vllm/offload_connector.hpp"

namespace understudy {

// Stores of a step are begun in the next, loads at once; in order in each direction. A flush ends its jobs, and all
// stores before them, in its step.
class OffloadSteps {
 public:
  OffloadSteps(std::uint32_t store_steps, std::uint32_t load_steps)
      : store_steps_(store_steps), load_steps_(load_steps) {}

  // One step; the jobs that are done, stores before loads.
  std::vector<JobId> run(const OffloadOrders& orders) {
    const auto flushed = [&](JobId id) { return std::ranges::binary_search(orders.flush, id); };
    for (const JobId id : std::exchange(unsubmitted_, {})) stores_.push_back({id, step_ + store_steps_});
    for (const JobId id : orders.stores) {
      if (flushed(id)) {
        stores_.push_back({id, step_ + store_steps_});
      } else {
        unsubmitted_.push_back(id);
      }
    }
    for (const JobId id : orders.loads) loads_.push_back({id, step_ + load_steps_});

    std::vector<JobId> done;
    std::size_t forced = 0;
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      if (flushed(stores_[i].id)) forced = i + 1;
    }
    for (; !stores_.empty() && (forced > 0 || stores_.front().due <= step_); stores_.pop_front()) {
      done.push_back(stores_.front().id);
      if (forced > 0) --forced;
    }
    for (; !loads_.empty() && loads_.front().due <= step_; loads_.pop_front()) done.push_back(loads_.front().id);
    ++step_;
    return done;
  }

 private:
  struct Due {
    JobId id;
    std::uint64_t due;
  };

  std::uint32_t store_steps_;
  std::uint32_t load_steps_;
  std::uint64_t step_ = 0;
  std::vector<JobId> unsubmitted_;
  std::deque<Due> stores_;
  std::deque<Due> loads_;
};

}  // namespace understudy
