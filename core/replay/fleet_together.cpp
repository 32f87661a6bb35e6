// Workers that affect each other: through sessions, a limit on concurrency, a router, or tiers that they share.
//
// One queue orders everything that happens. fleet_steps.cpp gives every step its place in it; fleet_lookahead.cpp gives
// a worker one entry, the earliest time at which it can finish a request.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

void Fleet::run_together(const Progress& progress) {
  std::uint64_t rounds = 0;
  open_lives();
  open_sessions();
  open_arrivals();
  for (std::size_t index = 0; config_.lockstep_ns > 0 && index < workers_.size(); index += config_.ranks) {
    want_begin(index);
  }
  while (!queue_.empty()) {
    const EventQueue::Entry next = queue_.pop();
    now_ns_ = std::max(now_ns_, next.time_ns);
    const auto subject = static_cast<std::size_t>(next.subject);
    switch (next.kind) {
      case EventClass::Landing:
        land_transfers();
        break;
      case EventClass::StepEnd:
        workers_[subject].next = EventQueue::kNone;
        stepwise() ? end_step(subject) : poll(subject);
        break;
      case EventClass::Delivery:
        deliver_events(subject);
        break;
      case EventClass::Session:
        ask_session(next.subject);
        break;
      case EventClass::Arrival:
        play_clock_.due.erase(next.subject);
        if (comes_too_late(next.subject)) break;
        if (bring_router_up_to_date()) {
          push_arrival(next.time_ns, next.subject);  // behind the events that the router must receive first
        } else {
          arrive(next.subject);
        }
        break;
      case EventClass::Abort:
        subject == workload_.size() ? cancel_rest() : abort(next.subject);
        break;
      case EventClass::Fault:
        subject % 2 == 0 ? begin_fault(subject / 2) : end_fault(subject / 2);
        break;
      case EventClass::HandBack:
        hand_back(subject);
        break;
      case EventClass::Tick:
        tick();
        break;
      case EventClass::Ready:
        become_ready(subject);
        break;
      case EventClass::Begin:
        begin_all();
        break;
    }
    reach_workers();
    if (lives_ && !lives_->draining.empty()) stop_drained();
    if (lives_ && !lives_->wrecks.empty()) clear_wrecks(false);
    queue_.set_landing(hub_.next_wake_ns());
    if (++rounds % 64 == 0) report(progress);
    if (queue_.empty() && observes_) {  // the last events, and transfers that have not landed
      for (std::size_t index = 0; !stepwise() && index < workers_.size(); ++index) {
        if (!is_present(index)) continue;
        advance_to_now(index);
        if (!net_) workers_[index].engine->finish_transfers();
      }
      gather_events();
      for (std::size_t index = 0; index < workers_.size(); index += config_.ranks) check_index(index);
    }
    if (queue_.empty() && lives_) fail_stranded();
  }
  require_none_stranded();
  for (std::size_t index = 0; index < workers_.size(); index += config_.ranks) {
    if (!is_present(index)) continue;
    require_progress(index);
    workers_[index].engine->finish_transfers();
  }
  collect_handoffs();
  if (lives_) clear_wrecks(true);
  for (std::size_t index = 0; index < workers_.size(); ++index) collect(index);
}

// ── Requests ──

void Fleet::open_arrivals() {
  if (!workload_.graph.empty()) return open_plays();
  for (std::uint64_t row = 0; row < workload_.size(); ++row) {
    if (workload_.turn[row] == 0) first_turns_.push_back(row);
  }
  if (config_.concurrency == 0) {
    std::ranges::stable_sort(first_turns_, {}, [this](std::uint64_t row) { return workload_.arrival_ns[row]; });
    push_next_arrival();
    return;
  }
  while (next_first_turn_ < std::min<std::size_t>(config_.concurrency, first_turns_.size())) {
    push_arrival(0, first_turns_[next_first_turn_++]);
  }
}

void Fleet::push_next_arrival() {
  if (next_first_turn_ == first_turns_.size()) return;
  const std::uint64_t row = first_turns_[next_first_turn_++];
  push_arrival(workload_.arrival_ns[row], row);
}

void Fleet::push_arrival(std::int64_t time_ns, std::uint64_t row) {
  const EventQueue::Handle handle = queue_.push(time_ns, EventClass::Arrival, row, row);
  if (plays_ && config_.play_limits.caps_idle() && arrival_ns_[row] < 0) play_clock_.due[row] = {time_ns, handle};
}

void Fleet::arrive(std::uint64_t row) {
  if (pushes_) return arrive_pushed(row);
  if (net_) return arrive_staged(row);
  const bool waited = arrival_ns_[row] >= 0;
  if (!arrive_first(row)) return;
  if (strand(row, RequestStage::Whole)) {
    if (!waited) push_abort(row);
    return;
  }
  const std::optional<std::size_t> chosen = route(row);
  if (!chosen) return end_turn(row, now_ns_);
  if (!waited) push_abort(row);
  if (*chosen != Router::kLater) place(row, *chosen);
}

// Counts a request that arrives; false if its client has aborted it while it waited for a worker.
bool Fleet::arrive_first(std::uint64_t row) {
  if (arrival_ns_[row] >= 0) return aborted_.empty() || !aborted_[row];
  mark_arrival(row);
  if (lives_) ++lives_->traffic.arrived;
  return true;
}

void Fleet::place(std::uint64_t row, std::size_t worker, KvLeg leg) {
  worker_of_[row] = static_cast<std::int32_t>(worker);
  if (lives_) lives_->place(row, worker);
  // Pushed KV: a request is with its decode worker once its prompt is computed.
  if (config_.steps && !(pushes_ && leg == KvLeg::Decode)) config_.steps->place(row, worker, now_ns_);
  sync_worker(lead(worker));
  absorb(lead(worker), submit(worker, row, now_ns_, leg));
  after_input(lead(worker));
}

// Brings a worker to now before something from outside reaches it.
void Fleet::sync_worker(std::size_t index) {
  if (stepwise()) return;
  advance_to_now(index);
  workers_[index].ready_round = round_;
}

// Plans the next event of a worker that something from outside has reached.
void Fleet::after_input(std::size_t index) {
  if (!stepwise()) return schedule_poll(index);
  if (!workers_[index].finished.empty()) record_finished(index);
  want_begin(index);
}

// Places requests that need not wait in the router any longer.
void Fleet::release_queued() {
  while (const std::optional<Released> next = config_.router->release(now_ns_)) {
    if (fits(next->row, next->worker)) {
      place(next->row, next->worker);
    } else {
      end_turn(next->row, now_ns_);
    }
  }
}

void Fleet::absorb(std::size_t index, const Effects& effects) {
  Worker& worker = workers_[index];
  worker.phase = effects.phase;
  worker.wake_ns = effects.wake_ns;
  worker.finished.insert(worker.finished.end(), effects.finished.begin(), effects.finished.end());
  for (const RequestRecord& record : effects.finished) {
    if (record.finish_ns >= worker.finish_bound_ns || record.reason == FinishReason::Cancelled) continue;
    throw Error(ErrorKind::InvariantViolated, "worker ", index, ": row ", record.id, " finishes at ", record.finish_ns,
                " ns, before the bound of ", worker.finish_bound_ns, " ns");
  }
  if (effects.has_events && keeps_events_ && !observes_ && !config_.on_step) {
    for (std::size_t rank = index; rank < index + config_.ranks; ++rank) keep_events(rank, gathered_);
  }
  if (pushes_) return track_legs(index, effects);
  if (lives_) {
    for (const NewTokens& tokens : effects.tokens) lives_->emitted[tokens.request] += tokens.tokens;
  }
  if (!tracks_) return;
  const bool queues = config_.router->queues();
  for (const NewTokens& tokens : effects.tokens) {
    const std::uint64_t row = tokens.request;
    // A queueing router sees requests start and end one by one, in the engine's order: each may release others before
    // the next is reported.
    const bool ends =
        queues && std::ranges::find(effects.finished, tokens.request, &RequestRecord::id) != effects.finished.end();
    if (started_[row] && !ends) continue;
    started_[row] = true;
    ends ? config_.router->ended(row) : config_.router->first_token(row);
    if (queues) release_queued();
  }
}

void Fleet::record_finished(std::size_t index) {
  if (workers_[index].finished.empty()) return;
  if (pushes_) return record_legs(index);
  std::vector<RequestRecord> finished;  // a released request may finish others
  finished.swap(workers_[index].finished);
  for (const RequestRecord& record : finished) {
    const std::uint64_t row = record.id;
    WorkerLoad& load = loads_[static_cast<std::size_t>(worker_of_[row])];
    UNDERSTUDY_ASSERT(load.outstanding_requests > 0, "a request ends on the worker that it was sent to");
    const bool prompt_only = !prefilling_.empty() && prefilling_[row];
    if (config_.steps) config_.steps->split(static_cast<std::size_t>(worker_of_[row]));
    const bool prefilled = prompt_only && record.reason != FinishReason::Cancelled;
    if (!prefilled) keep(record);
    if (lives_) {
      lives_->end(row, static_cast<std::size_t>(worker_of_[row]));
      if (!prefilled) count_traffic(row);
    }
    --load.outstanding_requests;
    load.outstanding_tokens -= tokens_of(row, index);
    if (tracks_) config_.router->ended(row);
    if (prefilled) {
      end_prefill(record);
      continue;
    }
    if (tracks_ && prompt_only && decode_worker_[row] >= 0) config_.router->ended(row);  // the decode router's choice
    if (config_.router->queues()) release_queued();
    end_turn(row, record.finish_ns);
  }
  finished.clear();
  if (workers_[index].finished.empty()) workers_[index].finished.swap(finished);  // keeps the memory
}

// A chat turn has ended: start the session's next turn, or another session in its place.
void Fleet::end_turn(std::uint64_t row, std::int64_t time_ns) {
  ++ended_;
  if (sessions_) put_to_sleep(row);
  if (plays_) return end_in_play(row, time_ns);
  if (workload_.next_turn[row] >= 0) {
    const auto next = static_cast<std::uint64_t>(workload_.next_turn[row]);
    push_arrival(time_ns + workload_.delay_ns[next], next);
  } else if (config_.concurrency > 0 && next_first_turn_ < first_turns_.size()) {
    push_arrival(time_ns + config_.turnaround_ns, first_turns_[next_first_turn_++]);
  }
}

// ── Entries of the queue ──

// Orders workers at one time by the first request that each got: not by how workers are numbered.
std::uint64_t Fleet::order_of(std::size_t worker) const {
  const std::uint64_t row = workers_[worker].first_row;
  return row == kNoRow ? workload_.size() + worker : row;
}

std::uint64_t Fleet::order_of_group(std::size_t lead) const {
  std::uint64_t first = order_of(lead);
  for (std::size_t rank = lead + 1; rank < lead + config_.ranks; ++rank) first = std::min(first, order_of(rank));
  return first;
}

void Fleet::want_begin(std::size_t index) {
  Worker& worker = workers_[index];
  if (worker.begins || worker.phase == Phase::InStep) return;
  cancel_entry(worker.next);  // a later beginning, before something reached the worker
  if (worker.phase == Phase::Ready && worker.wake_ns > now_ns_) return push_step_end(index);
  worker.begins = true;
  queue_.push_beginning(now_ns_, index);
}

void Fleet::push_step_end(std::size_t index) {
  Worker& worker = workers_[index];
  UNDERSTUDY_ASSERT(worker.wake_ns >= now_ns_, "a step does not end in the past");
  UNDERSTUDY_ASSERT(worker.next == EventQueue::kNone, "a worker has one entry among step ends");
  worker.next = queue_.push(worker.wake_ns, EventClass::StepEnd, order_of_group(index), index);
}

void Fleet::cancel_entry(EventQueue::Handle& handle) {
  if (handle != EventQueue::kNone) queue_.cancel(handle);
  handle = EventQueue::kNone;
}

// Begin the steps of one time together: a step may start something that ends at once, and the others must not see it.
void Fleet::begin_all() {
  queue_.take_beginnings(beginning_);
  for (const std::size_t index : beginning_) workers_[index].begins = false;
  if (beginning_.size() > 1) {
    std::ranges::sort(beginning_, {}, [this](std::size_t index) { return order_of_group(index); });
  }
  if (round_ns_ != now_ns_) rounds_before_ = round_;
  ++round_;
  round_ns_ = now_ns_;
  for (const std::size_t index : beginning_) {
    if (lives_ && !is_present(index)) continue;  // it has crashed
    if (stepwise()) {
      begin_step(index);
    } else {
      // An abort at this time may have left the worker without requests.
      const bool begins = workers_[index].phase != Phase::InStep && workers_[index].phase != Phase::Idle;
      if (begins) absorb(index, workers_[index].engine->begin_step(now_ns_));
      schedule_poll(index);
    }
  }
  if (stepwise()) wake_after_instant_landings();
  if (!config_.check) return;
  for (const Pool& pool : pools_) {
    if (pool.tiers) pool.tiers->check();
  }
}

WorkerCounts Fleet::counts(WorkerId index) {
  if (!is_present(index)) return {};
  if (!stepwise()) advance_to_now(index);
  const EngineSnapshot now = rank_of(index).snapshot();
  return {now.running, now.waiting + now.loading, now.active_blocks,
          now.active_blocks + now.cached_blocks + now.free_blocks};
}

}  // namespace understudy
