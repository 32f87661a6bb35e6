// Step by step: every step has its place in the queue.
#include <algorithm>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

void Fleet::land_transfers() {
  hub_.run_until(now_ns_);
  for (const std::size_t index : sleepers_) {
    absorb(index, workers_[index].engine->transfers_landed(now_ns_));
    if (workers_[index].wake_ns <= now_ns_) want_begin(index);
  }
}

void Fleet::end_step(std::size_t index) {
  Worker& worker = workers_[index];
  if (worker.phase == Phase::InStep) absorb(index, worker.engine->end_step(now_ns_));
  record_finished(index);
  // A queueing router may release a request at the end of any step, not only when one arrives.
  if (observes_ && config_.router->queues()) publish_step(index);
  check_index(index);
  want_begin(index);
}

void Fleet::begin_step(std::size_t index) {
  Worker& worker = workers_[index];
  if (worker.phase == Phase::InStep || worker.phase == Phase::Idle) return;
  if (config_.lockstep_ns > 0 && ended_ == workload_.size()) return;
  if (worker.phase == Phase::Asleep) std::erase(sleepers_, index);
  absorb(index, worker.engine->begin_step(now_ns_));
  record_finished(index);
  if (worker.phase == Phase::Stalled) require_progress(index);
  if (worker.phase == Phase::Asleep) {
    UNDERSTUDY_ASSERT(std::ranges::find(sleepers_, index) == sleepers_.end(), "a worker sleeps once");
    sleepers_.push_back(index);
  } else if (worker.phase != Phase::Idle) {
    push_step_end(index);
  }
}

// Transfers that take no time may have landed when another worker began: no landing event will wake their owner.
void Fleet::wake_after_instant_landings() {
  for (const std::size_t index : beginning_) {
    if (workers_[index].phase != Phase::Asleep) continue;
    absorb(index, workers_[index].engine->transfers_landed(now_ns_));
    if (workers_[index].wake_ns <= now_ns_) want_begin(index);
  }
}

}  // namespace understudy
