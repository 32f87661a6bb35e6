// Lookahead: each worker advances as far as nothing can reach it, up to the earliest time at which a request can
// finish.
#include <algorithm>
#include <utility>

#include "replay/fleet.hpp"

namespace understudy {

// Advance a worker to now, for an arrival or a call of the router. Where steps take no time, other workers may have
// begun steps now, once or more often; this one begins as many, if it was ready.
void Fleet::advance_to_now(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  absorb(index, engine.advance(now_ns_, {}));
  if (worker.phase == Phase::Stalled) throw_first_stuck();
  if (round_ns_ != now_ns_) return;
  for (std::uint64_t missed = std::max(worker.ready_round, rounds_before_); missed < round_; ++missed) {
    if (worker.phase != Phase::Ready || worker.wake_ns > now_ns_ || !worker.finished.empty()) return;
    absorb(index, engine.begin_step(now_ns_));
    absorb(index, engine.advance(now_ns_, {}));
  }
  worker.ready_round = round_;
}

// The worker may have finished a request now, and not before.
void Fleet::poll(std::size_t index) {
  const Effects& effects = workers_[index].engine->advance(now_ns_, {.stop_on_finish = true});
  absorb(index, effects);
  workers_[index].ready_round = round_;
  if (!effects.finished.empty()) check_index(index);  // a step has ended, and no other has begun
  record_finished(index);
  schedule_poll(index);
}

// Plans the next poll of a worker.
void Fleet::schedule_poll(std::size_t index) {
  Worker& worker = workers_[index];
  cancel_entry(worker.next);
  if (worker.phase == Phase::Stalled) throw_first_stuck();
  if (worker.finished.empty() && worker.phase == Phase::Idle) return;
  const auto when = [&] {
    return worker.finished.empty() ? worker.engine->next_visible_ns() : worker.finished.back().finish_ns;
  };
  const auto overdue = [&](std::int64_t time_ns) {
    return time_ns <= now_ns_ && worker.finished.empty() && worker.phase != Phase::InStep;
  };
  std::int64_t next_ns = when();
  if (overdue(next_ns)) {
    absorb(index, worker.engine->advance(now_ns_, {}));
    next_ns = when();
  }
  // A batch may be behind the last request: a worker that drains stops when that has ended.
  const bool ends = worker.state == WorkerState::Draining && loads_[index].outstanding_requests == 0 &&
                    worker.finished.empty() && (worker.phase == Phase::InStep || worker.phase == Phase::Ready);
  if (ends) next_ns = std::min(next_ns, worker.wake_ns);
  if (next_ns == Engine::kNever) return;  // until something reaches it
  if (config_.check && worker.finished.empty()) worker.finish_bound_ns = next_ns;
  if (overdue(next_ns)) return want_begin(index);
  worker.next = queue_.push(next_ns, EventClass::StepEnd, order_of(index), index);
}

// One worker is stuck, and others may have been before it, unnoticed: the error names the first.
void Fleet::throw_first_stuck() {
  std::vector<std::size_t> stuck;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (!is_present(index)) continue;
    workers_[index].phase = workers_[index].engine->advance(now_ns_, {}).phase;
    if (workers_[index].phase == Phase::Stalled) stuck.push_back(index);
  }
  const std::size_t first = *std::ranges::min_element(stuck, {}, [this](std::size_t index) {
    return std::pair(workers_[index].engine->stall().since_ns, order_of(index));
  });
  require_progress(first);
  throw Error(ErrorKind::InvariantViolated, "worker ", first, " is stuck, and makes progress");
}

}  // namespace understudy
