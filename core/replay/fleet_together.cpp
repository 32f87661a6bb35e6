// Workers that meet: in sessions, under a cap on concurrency, in a router's eyes, on tiers that they share.
//
// What a worker does concerns others when it finishes a request, when a router looks at it, or on a tier that they
// share. Where they share none, each is played only as far as somebody needs to know: its entry in the queue is a time
// before which it cannot finish a request. Else every step has its place in the queue, except that a worker rests over
// those that concern nobody else: it has one entry for them, and is roused when something reaches it before.
#include <algorithm>
#include <limits>
#include <utility>

#include "replay/fleet.hpp"

namespace understudy {

void Fleet::run_together(const Progress& progress) {
  std::uint64_t rounds = 0;
  open_arrivals();
  for (std::size_t index = 0; config_.lockstep_ns > 0 && index < workers_.size(); ++index) want_begin(index);
  while (!queue_.empty()) {
    const EventQueue::Entry next = queue_.pop();
    now_ns_ = std::max(now_ns_, next.time_ns);
    const auto subject = static_cast<std::size_t>(next.subject);
    switch (next.kind) {
      case EventClass::Landing:
        land();
        break;
      case EventClass::StepEnd:
        workers_[subject].next = EventQueue::kNone;
        stepping_ ? end_step(subject) : look(subject);
        break;
      case EventClass::Delivery:
        deliver(subject);
        break;
      case EventClass::Arrival:
        if (bring_up_to_date()) {
          push_arrival(next.time_ns, next.subject);  // when the router has been told
        } else {
          arrive(next.subject);
        }
        break;
      case EventClass::Begin:
        begin_all();
        break;
      case EventClass::HandOff:
      case EventClass::Tick:
        break;  // nobody asks for them yet
    }
    queue_.set_landing(hub_.next_wake_ns());
    if (++rounds % 64 == 0) report(progress);
    if (queue_.empty() && observes_) {  // the rest, and what has still to land
      for (std::size_t index = 0; !stepping_ && index < workers_.size(); ++index) {
        join(index);
        workers_[index].engine->finish_transfers();
      }
      gather_events();
    }
  }
  for (Worker& worker : workers_) {
    require_progress(worker);
    worker.engine->finish_transfers();
  }
  for (std::size_t index = 0; index < workers_.size(); ++index) collect(index);
}

// ── Requests come and go ──

void Fleet::open_arrivals() {
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
  queue_.push(time_ns, EventClass::Arrival, row, row);
}

void Fleet::arrive(std::uint64_t row) {
  if (config_.concurrency == 0 && workload_.turn[row] == 0) push_next_arrival();
  arrival_ns_[row] = now_ns_;
  const std::optional<std::size_t> chosen = route(row);
  if (!chosen) return after(row, now_ns_);
  if (*chosen != Router::kLater) place(row, *chosen);
}

void Fleet::place(std::uint64_t row, std::size_t worker) {
  worker_of_[row] = static_cast<std::int32_t>(worker);
  if (stepping_) {
    rouse(worker, false);
  } else {
    join(worker);
    if (!workers_[worker].engine->in_step()) workers_[worker].engine->skip_to(now_ns_);
    workers_[worker].ready_round = round_;
  }
  submit(worker, row, now_ns_);
  stepping_ ? want_begin(worker) : plan(worker);
}

void Fleet::release() {
  while (const std::optional<Released> next = config_.router->release(now_ns_)) {
    if (fits(next->row, next->worker)) {
      place(next->row, next->worker);
    } else {
      after(next->row, now_ns_);
    }
  }
}

void Fleet::absorb(Worker& worker, const StepEffects& effects) {
  worker.finished.insert(worker.finished.end(), effects.finished.begin(), effects.finished.end());
  if (keeps_events_ && !observes_ && !config_.on_step) keep_events(worker, gathered_);
  if (!tracks_) return;
  const bool queues = config_.router->queues();
  for (const NewTokens& tokens : effects.tokens) {
    const std::uint64_t row = worker.rows[tokens.request];
    // Who waits in the router sees requests start and end one by one, in the engine's order: each lets others go before
    // the next is known of.
    const bool ends =
        queues && std::ranges::find(effects.finished, tokens.request, &RequestRecord::id) != effects.finished.end();
    if (started_[row] && !ends) continue;
    started_[row] = true;
    ends ? config_.router->ended(row) : config_.router->first_token(row);
    if (queues) release();
  }
}

void Fleet::record_finished(std::size_t index) {
  Worker& worker = workers_[index];
  for (const RequestRecord& record : worker.finished) {
    const std::uint64_t row = worker.rows[record.id];
    keep(worker, record);
    --loads_[index].outstanding_requests;
    loads_[index].outstanding_tokens -= static_cast<std::uint64_t>(workload_.prompt_tokens[row]) +
                                        static_cast<std::uint64_t>(workload_.output_tokens[row]);
    if (tracks_) config_.router->ended(row);
    if (config_.router->queues()) release();
    after(row, record.finish_ns);
  }
  worker.finished.clear();
}

// A turn has ended: its session goes on, or makes room for another.
void Fleet::after(std::uint64_t row, std::int64_t time_ns) {
  ++ended_;
  if (workload_.next_turn[row] >= 0) {
    const auto next = static_cast<std::uint64_t>(workload_.next_turn[row]);
    push_arrival(time_ns + workload_.delay_ns[next], next);
  } else if (config_.concurrency > 0 && next_first_turn_ < first_turns_.size()) {
    push_arrival(time_ns + config_.turnaround_ns, first_turns_[next_first_turn_++]);
  }
}

// Among workers at one time, whoever got the earliest request goes first: not a matter of how workers are numbered.
std::uint64_t Fleet::order_of(std::size_t worker) const {
  const std::vector<std::uint64_t>& rows = workers_[worker].rows;
  return rows.empty() ? workload_.size() + worker : rows.front();
}

void Fleet::want_begin(std::size_t index) {
  Worker& worker = workers_[index];
  if (worker.begins || worker.engine->in_step()) return;
  if (config_.ranks && std::ranges::any_of(workers_, [](const Worker& rank) { return rank.engine->in_step(); })) return;
  worker.begins = true;
  queue_.push_beginning(now_ns_, index);
}

void Fleet::forget(EventQueue::Handle& handle) {
  if (handle != EventQueue::kNone) queue_.take_back(handle);
  handle = EventQueue::kNone;
}

// ── Step by step ──

void Fleet::land() {
  hub_.run_until(now_ns_);
  for (const std::size_t index : sleepers_) {
    if (workers_[index].engine->landed(now_ns_)) want_begin(index);
  }
}

void Fleet::end_step(std::size_t index) {
  if (workers_[index].resting) {
    set_resting(workers_[index], false);
    absorb(workers_[index], workers_[index].engine->catch_up(now_ns_, false));
  }
  if (workers_[index].engine->in_step()) absorb(workers_[index], workers_[index].engine->end_step(now_ns_));
  record_finished(index);
  // Who has requests waiting may let one go at any step's end, and not only when one arrives.
  if (observes_ && (config_.check || config_.router->queues())) {
    workers_[index].engine->take_events(gathered_);
    (void)tell_router(index, workers_[index].pool, order_of(index), workers_[index].events);
    // Without prefix caching a manager may name blocks all the same, for itself: nobody is told of them.
    const bool tells = pools_[workers_[index].pool].config.engine.enable_prefix_caching;
    if (config_.check && tells) config_.router->check(index, workers_[index].engine->residency());
  }
  if (!config_.ranks) return want_begin(index);
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) want_begin(rank);  // when the last has ended
}

// All that begin now, together: what one of them starts may end at once, which the others are not to see before.
void Fleet::begin_all() {
  queue_.take_beginnings(beginning_);
  for (const std::size_t index : beginning_) workers_[index].begins = false;
  if (beginning_.size() > 1) {
    std::ranges::sort(beginning_, {}, [this](std::size_t index) { return order_of(index); });
  }
  if (round_ns_ != now_ns_) rounds_before_ = round_;
  ++round_;
  round_ns_ = now_ns_;
  for (const std::size_t index : beginning_) {
    if (stepping_) {
      begin_step(index);
    } else {
      if (!workers_[index].engine->in_step()) workers_[index].engine->begin_step(now_ns_);
      plan(index);
    }
  }
  // What takes no time may have landed already, when another worker began: no landing will wake whom it was for.
  for (const std::size_t index : beginning_) {
    if (stepping_ && workers_[index].engine->asleep() && workers_[index].engine->landed(now_ns_)) want_begin(index);
  }
  if (config_.ranks) step_together();
  if (!config_.check) return;
  for (const Pool& pool : pools_) {
    if (pool.tiers) pool.tiers->check();
  }
}

// Ranks that have begun now: their experts see the tokens of all, each padded to the largest, as vLLM does it; and all
// take as long as the slowest.
void Fleet::step_together() {
  std::erase_if(beginning_, [this](std::size_t rank) { return !workers_[rank].engine->in_step(); });
  std::uint64_t tokens = 0;
  for (const std::size_t rank : beginning_) tokens = std::max(tokens, workers_[rank].engine->step_tokens());
  tokens *= workers_.size();
  std::int64_t slowest_ns = 0;
  for (const std::size_t rank : beginning_) {
    slowest_ns = std::max(slowest_ns, workers_[rank].engine->retime_step(tokens));
  }
  for (const std::size_t rank : beginning_) {
    forget(workers_[rank].next);
    workers_[rank].next = queue_.push(now_ns_ + slowest_ns, EventClass::StepEnd, order_of(rank), rank);
  }
}

void Fleet::begin_step(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  const bool lockstep = config_.lockstep_ns > 0;
  if (worker.resting || engine.in_step() || (engine.idle() && !(lockstep && ended_ < workload_.size()))) return;
  if (engine.asleep()) std::erase(sleepers_, index);
  if (const std::optional<std::int64_t> end_ns = resting_ ? engine.rest(now_ns_) : std::nullopt) {
    set_resting(worker, !engine.in_step());
    worker.next = queue_.push(*end_ns, EventClass::StepEnd, order_of(index), index);
    return;
  }
  open_step(index);
}

void Fleet::open_step(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  const bool lockstep = config_.lockstep_ns > 0;
  std::int64_t duration_ns = 0;
  if (lockstep && pools_[worker.pool].config.engine.async_scheduling) {
    // As recordings have it: the update that follows a schedule is that of the step before, which ends now.
    absorb(worker, engine.play_turn(now_ns_));
    record_finished(index);
  } else {
    duration_ns = engine.begin_step(now_ns_);
  }
  if (engine.stuck()) require_progress(worker);
  if (engine.asleep()) {
    sleepers_.push_back(index);
  } else {
    worker.next = queue_.push(now_ns_ + (lockstep ? config_.lockstep_ns : duration_ns), EventClass::StepEnd,
                              order_of(index), index);
  }
}

// The steps of its rest are played as far as they have come, since something reaches it now: it is in the middle of
// one, or has just ended one. A landing comes before the ends of steps at the same time, all else after.
void Fleet::rouse(std::size_t index, bool landing) {
  Worker& worker = workers_[index];
  if (!worker.resting) return;
  set_resting(worker, false);
  forget(worker.next);
  absorb(worker, worker.engine->catch_up(now_ns_, landing));
  if (worker.engine->in_step()) {
    worker.next = queue_.push(worker.engine->now_ns(), EventClass::StepEnd, order_of(index), index);
  } else if (round_ns_ == now_ns_) {
    open_step(index);  // others have begun theirs
  } else {
    want_begin(index);
  }
}

// Something lands that its steps see in their samples alone.
void Fleet::rest_on(std::size_t index) {
  Worker& worker = workers_[index];
  if (!worker.resting || worker.engine->rested_step_ns() >= now_ns_) return;
  absorb(worker, worker.engine->rest_on(now_ns_));
  if (!worker.engine->in_step()) return;
  set_resting(worker, false);
  forget(worker.next);
  worker.next = queue_.push(worker.engine->now_ns(), EventClass::StepEnd, order_of(index), index);
}

void Fleet::set_resting(Worker& worker, bool on) {
  worker.resting = on;
  worker.engine->tiers()->watch_landings(on);
}

// ── Each as far as nothing can reach it ──

// The worker is where it has to be for a request to come, or for a router to look. Where steps take no time, others may
// have begun theirs now, once or more often, and so has this one, as often as it was ready.
void Fleet::join(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  absorb(worker, unseen_ ? engine.advance_through(now_ns_) : engine.advance(now_ns_, false));
  if (engine.stuck()) halt();
  if (round_ns_ != now_ns_) return;
  for (std::uint64_t missed = std::max(worker.ready_round, rounds_before_); missed < round_; ++missed) {
    if (engine.in_step() || engine.now_ns() > now_ns_ || engine.idle() || engine.asleep()) return;
    if (!worker.finished.empty()) return;
    engine.begin_step(now_ns_);
    absorb(worker, engine.advance(now_ns_, false));
  }
  worker.ready_round = round_;
}

// It may have finished a request now, and not before.
void Fleet::look(std::size_t index) {
  absorb(workers_[index], workers_[index].engine->advance_lazily(now_ns_));
  workers_[index].ready_round = round_;
  record_finished(index);
  plan(index);
}

// Somebody is stuck, and others may have been before, whom nobody has looked at since: the first is named.
void Fleet::halt() {
  std::vector<std::size_t> stuck;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    (void)workers_[index].engine->advance(now_ns_, false);
    if (workers_[index].engine->stuck()) stuck.push_back(index);
  }
  require_progress(workers_[*std::ranges::min_element(stuck, {}, [this](std::size_t index) {
    return std::pair(workers_[index].engine->begun_ns(), order_of(index));
  })]);
}

// When to look next.
void Fleet::plan(std::size_t index) {
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  forget(worker.next);
  if (engine.stuck()) halt();
  if (worker.finished.empty() && engine.idle() && !engine.in_step()) return;
  const auto when = [&] { return worker.finished.empty() ? engine.no_finish_before() : engine.now_ns(); };
  const auto overdue = [&](std::int64_t time_ns) {
    return time_ns <= now_ns_ && worker.finished.empty() && !engine.in_step();
  };
  std::int64_t next_ns = when();
  if (overdue(next_ns)) {
    absorb(worker, engine.advance(now_ns_, false));
    next_ns = when();
  }
  if (overdue(next_ns)) return want_begin(index);
  worker.next = queue_.push(next_ns, EventClass::StepEnd, order_of(index), index);
}

WorkerState Fleet::state(std::size_t index) {
  stepping_ ? rouse(index, false) : join(index);
  const EngineSnapshot now = workers_.at(index).engine->snapshot();
  return {now.running, now.waiting + now.loading, now.active_blocks,
          now.active_blocks + now.cached_blocks + now.free_blocks};
}

}  // namespace understudy
