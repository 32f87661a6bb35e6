// Faults: workers that crash or slow down, links, tiers, and the router with the events that it receives.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

void Fleet::check_faults() const {
  std::uint64_t workers = 0;
  for (const WorkerPool& pool : config_.pools) workers += pool.num_workers;
  const bool loses_requests = config_.lost.drain_ns || std::ranges::any_of(config_.faults, [](const Fault& fault) {
                                return fault.kind == FaultKind::Crash;
                              });
  if (config_.disaggregation && loses_requests) {
    throw Error(ErrorKind::ConfigError, "faults: crashes and a limit on draining do not work with prefill and decode ",
                "workers yet; leave them out");
  }
  if (!config_.faults.empty() && config_.session_policy) {
    throw Error(ErrorKind::ConfigError, "faults: policies for sleeping sessions do not work with faults yet");
  }
  for (std::size_t number = 0; number < config_.faults.size(); ++number) {
    const Fault& fault = config_.faults[number];
    const auto refuse = [number](const auto&... why) {
      throw Error(ErrorKind::ConfigError, "faults: number ", number, ": ", why...);
    };
    if (fault.time_ns < 0 || fault.duration_ns < 0 || fault.delay_ns < 0) refuse("times must not be negative");
    if (!(fault.factor >= 1 && fault.factor <= 1 / Links::kLeastShare)) refuse("factor must be from 1 to 1000");
    if (!(fault.rate >= 0 && fault.rate <= 1)) refuse("rate must be a share from 0 to 1");
    if (fault.worker && !config_.elastic && *fault.worker >= workers) {
      refuse("there is no worker ", *fault.worker, "; there are ", workers);
    }
    if (fault.kind == FaultKind::SlowLink && fault.tier != Tier::G2 && fault.worker) {
      refuse("workers share this tier; leave worker out");
    }
    if (disturbs_events(fault) && !config_.router->observes()) {
      refuse("the router receives no events; choose one that does, or leave the fault out");
    }
  }
}

void Fleet::open_faults() {
  const std::size_t faults = config_.faults.size();
  lives_->fault_began_ns.assign(faults, -1);
  lives_->fault_ended_ns.assign(faults, -1);
  for (std::size_t number = 0; number < faults; ++number) {
    queue_.push(config_.faults[number].time_ns, EventClass::Fault, number, 2 * number);
  }
  if (!observes_ || faults == 0) return;
  lives_->disturber.emplace(config_.faults, config_.fault_seed);
  for (std::size_t index = 0; index < workers_.size(); ++index) lives_->disturber->add_worker();
}

bool Fleet::hits(const Fault& fault, std::size_t worker) const { return !fault.worker || *fault.worker == worker; }

void Fleet::begin_fault(std::size_t number) {
  if (ended_ == workload_.size()) return;
  const Fault& fault = config_.faults[number];
  if (disturbs_events(fault)) {
    if (bring_router_up_to_date()) {  // behind the events that the router must receive first
      queue_.push(now_ns_, EventClass::Fault, number, 2 * number);
      return;
    }
    disturb_router(fault, true);
  }
  bool found = disturbs_events(fault);
  if (fault.kind != FaultKind::Crash && !found) lives_->active_faults.push_back(number);
  const std::size_t workers = workers_.size();
  for (std::size_t index = 0; index < workers && !disturbs_events(fault); ++index) {
    if (!hits(fault, index)) continue;
    if (fault.kind == FaultKind::Crash) {
      found = crash(index, number) || found;
    } else if (is_present(index)) {
      found = true;
      sync_worker(index);
      apply_faults(index);
      if (!stepwise()) schedule_poll(index);
    }
  }
  if (found) lives_->fault_began_ns[number] = now_ns_;
  if (fault.duration_ns > 0) queue_.push(now_ns_ + fault.duration_ns, EventClass::Fault, number, 2 * number + 1);
}

void Fleet::end_fault(std::size_t number) {
  if (ended_ == workload_.size()) return;
  const Fault& fault = config_.faults[number];
  const bool rereads = fault.kind == FaultKind::LoseEvents || fault.kind == FaultKind::RouterRestart;
  if (rereads) {
    if (bring_router_up_to_date()) {
      queue_.push(now_ns_, EventClass::Fault, number, 2 * number + 1);
      return;
    }
    disturb_router(fault, false);
  }
  if (lives_->fault_began_ns[number] >= 0) lives_->fault_ended_ns[number] = now_ns_;
  if (std::erase(lives_->active_faults, number) == 0) return;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (!hits(fault, index) || !is_present(index)) continue;
    sync_worker(index);
    apply_faults(index);
    if (!stepwise()) schedule_poll(index);
  }
}

// Sets a worker's engine to the worst of the faults that last.
void Fleet::apply_faults(std::size_t index) {
  Engine& engine = *workers_[index].engine;
  Lives::Disturbed& set = lives_->disturbed[index];
  Lives::Disturbed wanted;
  for (const std::size_t number : lives_->active_faults) {
    const Fault& fault = config_.faults[number];
    if (!hits(fault, index)) continue;
    const auto tier = static_cast<std::size_t>(fault.tier) - 1;
    if (fault.kind == FaultKind::SlowWorker) wanted.slowdown = std::max(wanted.slowdown, fault.factor);
    if (fault.kind == FaultKind::SlowLink) wanted.shares[tier] = std::min(wanted.shares[tier], 1 / fault.factor);
    if (fault.kind == FaultKind::LoadErrors) wanted.failures[tier] = std::max(wanted.failures[tier], fault.rate);
  }
  if (wanted.slowdown != set.slowdown) engine.set_slowdown(wanted.slowdown);
  for (std::size_t at = 0; at < wanted.shares.size(); ++at) {
    const auto tier = static_cast<Tier>(at + 1);
    if (wanted.shares[at] != set.shares[at]) engine.set_link_share(now_ns_, tier, wanted.shares[at]);
    if (wanted.failures[at] != set.failures[at]) engine.set_load_failures(tier, wanted.failures[at]);
  }
  set = wanted;
}

// ── Crashes ──

// Returns whether the worker was there.
bool Fleet::crash(std::size_t index, std::size_t number) {
  const LifeState state = lives_->state[index];
  if (is_gone(state)) return false;
  std::vector<LostRequest> lost;
  if (is_present(index)) {
    lost = take_requests(index);
    wreck(index);
  } else {
    cancel_entry(workers_[index].next);
  }
  std::erase(lives_->draining, index);
  enter(index, LifeState::Crashed);
  shown_ = {};
  lives_->last_crash = RequestLoss{now_ns_, 0, index, Survival::Fail, static_cast<std::int32_t>(number), 0};
  for (LostRequest& request : lost) lose(std::move(request), index, static_cast<std::int32_t>(number));
  if (config_.router->queues()) release_queued();
  const std::int64_t away_ns = config_.faults[number].duration_ns;
  if (away_ns > 0 && state != LifeState::Draining) {
    enter(index, LifeState::Restarting);
    workers_[index].next = queue_.push(now_ns_ + away_ns, EventClass::Ready, index, index);
  }
  return true;
}

// Takes the engine of a worker out of the run. Its transfers over links that others share go on to their ends.
void Fleet::wreck(std::size_t index) {
  Worker& worker = workers_[index];
  cancel_entry(worker.next);
  leave_sleepers(index);
  if (observes_) {
    publish_step(index);
  } else if (keeps_events_) {
    keep_events(index, gathered_);
  }
  EventRecords known;
  if (lives_->disturber) known = lives_->disturber->end(index);
  set_state(index, WorkerState::Gone);
  if (!config_.router->has_index()) send_rows(index, std::move(known));
  if (keeps_events_) {  // readers of the log see an empty cache from here on
    NamedBlocks named;
    named.apply(worker.events.rows().batch.records, true);
    TimedEvents gone;
    gone.batch.records = NamedBlocks().difference_from(named);
    gone.time_ns.resize(gone.batch.records.size(), now_ns_);
    worker.events.append(gone);
  }
  if (worker.phase == Phase::InStep) (void)worker.engine->end_step(now_ns_);
  worker.phase = Phase::Idle;
  worker.wake_ns = Engine::kNever;
  worker.finish_bound_ns = 0;
  lives_->disturbed[index] = {};
  if (config_.checkpoints) config_.checkpoints->restart(index);
  lives_->wrecks.push_back({index, std::move(worker.engine)});
  clear_wrecks(false);
}

void Fleet::clear_wrecks(bool at_end) {
  for (Wreck& wreck : lives_->wrecks) {
    if (wreck.is_counted) continue;
    Engine& engine = *wreck.engine;
    if (!stepwise() || at_end) {
      engine.finish_transfers();
    } else if (engine.has_transfers()) {
      (void)engine.transfers_landed(now_ns_);
      if (engine.has_transfers()) continue;
    }
    if (config_.check) engine.check();
    if (config_of(wreck.worker).kv_trace) add_kv_trace(workers_[wreck.worker], engine);
    columns_.add_engine(wreck.worker, engine, true);
    wreck.is_counted = true;
  }
  std::erase_if(lives_->wrecks, [this](const Wreck& wreck) {
    const Worker& worker = workers_[wreck.worker];
    const bool is_asked = wreck.worker == pools_[worker.info.pool].first_worker && !worker.engine;
    return wreck.is_counted && !is_asked;
  });
}

// ── The router ──

void Fleet::disturb_router(const Fault& fault, bool begins) {
  if (begins && fault.kind != FaultKind::RouterRestart) return;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (!hits(fault, index) || !is_present(index)) continue;
    if (begins) {
      EventRecords known = lives_->disturber->forget(index);
      if (!config_.router->forget_blocks(index)) send_rows(index, std::move(known));
    } else {
      send_rows(index, lives_->disturber->reread(index));
    }
  }
}

// Sends rows to the router that no worker has published now.
void Fleet::send_rows(std::size_t index, EventRecords rows) {
  gathered_.batch.records = std::move(rows);
  gathered_.time_ns.assign(gathered_.batch.records.size(), now_ns_);
  (void)send(index, workers_[index].info.pool, order_of(index));
}

}  // namespace understudy
