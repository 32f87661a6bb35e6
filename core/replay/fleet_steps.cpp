// Step by step: every step has its place in the queue.
#include <algorithm>
#include <utility>

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
  leave_sleepers(index);  // a landing may have woken it without taking it off the list
  absorb(index, worker.engine->begin_step(now_ns_));
  record_finished(index);
  if (worker.phase == Phase::Stalled) require_progress(index);
  if (worker.phase == Phase::Asleep) {
    join_sleepers(index);
  } else if (worker.phase != Phase::Idle) {
    push_step_end(index);
  }
}

void Fleet::join_sleepers(std::size_t index) {
  UNDERSTUDY_ASSERT(!workers_[index].sleeps, "a worker sleeps once");
  workers_[index].sleeps = true;
  sleepers_.push_back(index);
}

void Fleet::leave_sleepers(std::size_t index) {
  if (std::exchange(workers_[index].sleeps, false)) std::erase(sleepers_, index);
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
