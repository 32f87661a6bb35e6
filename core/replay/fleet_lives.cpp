// Workers that join and leave during a run, as a scaler orders.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kMostVainTicks = 100'000;

bool stands(LifeState state) {
  return state == LifeState::Starting || state == LifeState::Ready || state == LifeState::Restarting;
}

}  // namespace

void Fleet::check_elastic() const {
  if (!config_.elastic && config_.faults.empty()) return;
  if (config_.elastic && config_.elastic->start_ns.size() != config_.pools.size()) {
    throw Error(ErrorKind::ConfigError, "start_ns has ", config_.elastic->start_ns.size(), " entries for ",
                config_.pools.size(), " pools");
  }
  if (config_.lockstep_ns > 0 || config_.ranks > 1) {
    throw Error(ErrorKind::ConfigError, config_.elastic ? "autoscale does" : "faults do", " not work with ",
                config_.ranks > 1 ? "ranks that step together" : "lockstep", " yet; leave one of them out");
  }
}

void Fleet::open_lives() {
  if (!config_.elastic && config_.faults.empty()) return;
  lives_ = std::make_unique<Lives>(workload_.size());
  lives_->state.resize(workers_.size());
  lives_->rows.resize(workers_.size());
  lives_->disturbed.resize(workers_.size());
  for (std::size_t index = 0; index < workers_.size(); ++index) enter(index, LifeState::Ready);
  if (config_.elastic && config_.elastic->first_tick_ns) {
    queue_.push(*config_.elastic->first_tick_ns, EventClass::Tick, 0, 0);
  }
  open_faults();
}

void Fleet::enter(std::size_t index, LifeState state) {
  lives_->state[index] = state;
  lives_->events.push_back({now_ns_, index, state});
}

// ── Ticks ──

void Fleet::tick() {
  if (ended_ == workload_.size()) return;
  const bool is_last = queue_.empty();
  const ScaleOrder order = config_.elastic->on_tick(measure());
  lives_->traffic = {};
  lives_->traffic.since_ns = now_ns_;
  if (order.targets.size() > pools_.size()) {
    throw Error(ErrorKind::PolicyError, "the scaler returned ", order.targets.size(), " targets for ", pools_.size(),
                " pools");
  }
  bool changed = false;
  for (std::uint32_t pool = 0; pool < order.targets.size(); ++pool) {
    if (order.targets[pool]) changed = scale(pool, *order.targets[pool]) || changed;
  }
  lives_->vain_ticks = is_last && !changed ? lives_->vain_ticks + 1 : 0;
  if (!order.next_ns) return;
  if (*order.next_ns <= now_ns_) {
    throw Error(ErrorKind::PolicyError, "the scaler's next tick, at ", *order.next_ns,
                " ns, must be after this one, at ", now_ns_, " ns");
  }
  if (lives_->vain_ticks > kMostVainTicks) throw_stranded();
  queue_.push(*order.next_ns, EventClass::Tick, 0, 0);
}

FleetMetrics Fleet::measure() {
  FleetMetrics out;
  out.now_ns = now_ns_;
  out.traffic = lives_->traffic;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (is_gone(lives_->state[index])) continue;
    WorkerMetrics& metrics = out.workers.emplace_back();
    metrics.worker = index;
    metrics.pool = workers_[index].info.pool;
    metrics.state = lives_->state[index];
    if (workers_[index].engine) measure_step(index, metrics);
  }
  return out;
}

void Fleet::measure_step(std::size_t index, WorkerMetrics& out) {
  if (!stepwise()) advance_to_now(index);
  std::vector<SentRequest>& sent = lives_->sent;
  sent.clear();
  for (const std::uint64_t row : lives_->rows[index]) {
    const std::uint32_t tokens = lives_->emitted[row];
    sent.push_back({row, static_cast<std::uint64_t>(workload_.prompt_tokens[row]) + tokens, tokens > 0});
  }
  lives_->meter.measure(*workers_[index].engine, sent, out);
}

void Fleet::count_traffic(std::uint64_t row) {
  const FleetResult& columns = columns_.result();
  if (columns.fate[row] != static_cast<std::uint8_t>(RequestFate::Completed)) return;
  TrafficWindow& traffic = lives_->traffic;
  const auto prompt = static_cast<std::uint64_t>(workload_.prompt_tokens[row]);
  const auto output = static_cast<std::uint64_t>(columns.output_tokens[row]);
  ++traffic.completed;
  traffic.prompt_tokens += prompt;
  traffic.output_tokens += output;
  if (prompt > 0) {
    traffic.hit_share += static_cast<double>(columns.cached_tokens_first[row]) / static_cast<double>(prompt);
  }
  if (output < 1) return;
  const std::int64_t first_ns = columns.first_token_ns[row];
  ++traffic.with_tokens;
  traffic.ttft_ns += static_cast<double>(first_ns - arrival_ns_[row]);
  if (output < 2) return;
  ++traffic.with_gaps;
  traffic.itl_ns += static_cast<double>(columns.last_token_ns[row] - first_ns) / static_cast<double>(output - 1);
}

// ── Workers ──

// Orders as many workers of a pool as are missing; the highest ids leave. Returns whether anything changed.
bool Fleet::scale(std::uint32_t pool, std::uint32_t target) {
  std::vector<std::size_t> standing;
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (workers_[index].info.pool == pool && stands(lives_->state[index])) standing.push_back(index);
  }
  const bool changes = standing.size() != target;
  for (std::size_t missing = standing.size(); missing < target; ++missing) start_worker(pool);
  for (; standing.size() > target; standing.pop_back()) leave(standing.back());
  return changes;
}

void Fleet::start_worker(std::uint32_t pool) {
  const std::size_t index = add_worker(pool, WorkerState::Starting);
  lives_->state.push_back(LifeState::Starting);
  lives_->rows.emplace_back();
  lives_->disturbed.emplace_back();
  if (lives_->disturber) lives_->disturber->add_worker();
  columns_.add_late_worker(index, pool);
  shown_ = {};
  enter(index, LifeState::Starting);
  const std::int64_t delay_ns = config_.elastic->start_ns[pool];
  if (delay_ns <= 0) return become_ready(index);
  workers_[index].next = queue_.push(now_ns_ + delay_ns, EventClass::Ready, index, index);
}

// A cold worker: its caches are empty.
void Fleet::become_ready(std::size_t index) {
  workers_[index].next = EventQueue::kNone;
  if (ended_ == workload_.size()) return;
  make_engine(index);
  workers_[index].harvested = false;
  apply_faults(index);
  set_state(index, WorkerState::Ready);
  enter(index, LifeState::Ready);
  for (const std::uint64_t row : std::exchange(lives_->stranded, {})) push_arrival(now_ns_, row);
  if (config_.router->queues()) release_queued();
}

void Fleet::leave(std::size_t index) {
  if (lives_->state[index] != LifeState::Ready) return stop_worker(index);
  set_state(index, WorkerState::Draining);
  enter(index, LifeState::Draining);
  lives_->draining.push_back(index);
  if (!stepwise()) schedule_poll(index);
  if (config_.lost.drain_ns) queue_.push(now_ns_ + *config_.lost.drain_ns, EventClass::HandBack, index, index);
}

void Fleet::stop_drained() {
  for (std::size_t at = 0; at < lives_->draining.size();) {
    const std::size_t index = lives_->draining[at];
    if (has_drained(index)) {
      lives_->draining.erase(lives_->draining.begin() + static_cast<std::ptrdiff_t>(at));
      stop_worker(index);
    } else {
      ++at;
    }
  }
}

// Without requests, blocks that a peer will read, and transfers over links that other workers share.
bool Fleet::has_drained(std::size_t index) {
  const Worker& worker = workers_[index];
  if (loads_[index].outstanding_requests > 0 || !worker.finished.empty() || worker.phase != Phase::Idle) return false;
  return !stepwise() || !worker.engine->has_transfers();
}

void Fleet::stop_worker(std::size_t index) {
  Worker& worker = workers_[index];
  cancel_entry(worker.next);
  if (worker.engine) {
    if (!stepwise()) worker.engine->finish_transfers();
    if (observes_) publish_step(index);
    harvest(index);
  }
  set_state(index, WorkerState::Gone);
  shown_ = {};
  enter(index, LifeState::Stopped);
}

bool Fleet::is_present(std::size_t index) const {
  const Worker& worker = workers_[lead(index)];
  return worker.engine && worker.state != WorkerState::Gone;
}

// An engine of the pool that says which requests fit, also while its first worker is away.
Engine& Fleet::asked_engine(const Pool& pool) const {
  const std::size_t first = lead(pool.first_worker);
  if (workers_[first].engine) return *workers_[first].engine;
  const auto wreck = std::ranges::find(lives_->wrecks, first, &Wreck::worker);
  UNDERSTUDY_ASSERT(wreck != lives_->wrecks.end(), "the first engine of a pool is kept");
  return *wreck->engine;
}

// ── Requests without a worker ──

bool Fleet::strand(std::uint64_t row, RequestStage stage) {
  if (!lives_ || !ready_[static_cast<std::size_t>(stage)].empty()) return false;
  lives_->stranded.push_back(row);
  return true;
}

void Fleet::require_none_stranded() const {
  if (lives_ && !lives_->stranded.empty()) throw_stranded();
}

void Fleet::throw_stranded() const {
  throw Error(ErrorKind::WrongState, "the run makes no progress: ", workload_.size() - ended_,
              " requests have not ended, ", lives_->stranded.size(), " of them wait for a worker, and ",
              config_.elastic ? "the scaler starts none" : "none is left");
}

}  // namespace understudy
