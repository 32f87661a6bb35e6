#include "replay/fleet.hpp"

#include <algorithm>
#include <utility>

#include "replay/trace_identities.hpp"

namespace understudy {

Fleet::Fleet(FleetConfig config, WorkloadColumns workload)
    : config_(with_stages(std::move(config))),
      workload_(workload),
      shows_blocks_(config_.router->reads_residency() && can_show_blocks() && !disturbs_events(config_.faults)),
      observes_(config_.router->observes() && !shows_blocks_),
      tracks_(config_.router->tracks()),
      started_(tracks_ ? workload.size() : 0),
      aborted_(has_aborts() ? workload.size() : 0),
      arrival_ns_(workload.size(), -1),
      worker_of_(workload.size(), -1) {
  if (config_.pools.empty()) throw Error(ErrorKind::ConfigError, "a fleet needs at least one pool");
  check_elastic();
  check_faults();
  config_.router->begin();
  set_up_stages();
  for (const WorkerPool& pool : config_.pools) {
    if (pool.num_workers < 1) throw Error(ErrorKind::ConfigError, "workers must be at least 1");
    if (config_.ranks < 1 || pool.num_workers % config_.ranks != 0) {
      throw Error(ErrorKind::ConfigError, "ranks: ", pool.num_workers, " workers are no whole number of groups of ",
                  config_.ranks, " ranks; give a multiple of it");
    }
    if (pool.tiers && config_.lockstep_ns > 0) {
      throw Error(ErrorKind::ConfigError,
                  "tiers contradict lockstep, whose steps have one length whatever is on its way");
    }
    const std::shared_ptr<EngineConfig> engine = pool.engine->clone();
    keeps_events_ = keeps_events_ || engine->events;
    engine->check = config_.check;
    engine->events = engine->events || observes_;
    engine->published_blocks = shows_blocks_;
    // Rules of disaggregation may ask workers for a prompt; checkpoints compare runs, of which one may publish events.
    const bool asks = config_.disaggregation && config_.disaggregation->decider->reads_cache();
    engine->private_names = !asks && !config_.checkpoints;
    engine->lockstep_ns = config_.lockstep_ns;
    Pool& added = pools_.emplace_back();
    added.config = pool;
    added.engine = engine;
    added.first_worker = workers_.size();
    for (std::uint32_t i = 0; i < pool.num_workers; ++i) {
      add_worker(static_cast<std::uint32_t>(pools_.size() - 1), WorkerState::Ready);
    }
  }
  if (std::ranges::any_of(workload_.next_turn, [](std::int64_t next) { return next >= 0; })) {
    session_.resize(workload_.size());
    for (std::uint64_t row = 0; row < workload_.size(); ++row) {
      if (workload_.turn[row] != 0) continue;
      for (auto at = static_cast<std::int64_t>(row); at >= 0; at = workload_.next_turn[static_cast<std::size_t>(at)]) {
        session_[static_cast<std::size_t>(at)] = row;
      }
    }
  }
  mode_ = choose_mode();
  if (config_.checkpoints) config_.checkpoints->begin(workers_.size(), config_.fast_forward);
  for (Pool& pool : pools_) {
    const TierConfig* tiers = pool.config.tiers ? &*pool.config.tiers : nullptr;
    if (tiers == nullptr || mode_.mode == RunMode::Independent || (!stepwise() && !tiers->g3 && !tiers->g4)) continue;
    const EngineConfig& engine = *pool.engine;
    pool.tiers =
        std::make_unique<TierRun>(*tiers, engine.block_size, engine.events, engine.check, &hub_, pool.config.name);
    pool.shared_events.resize(pool.tiers->shared().size());
  }
  // Independent workers run one after another, and need memory only while they run.
  for (std::size_t i = 0; i < workers_.size(); i += config_.ranks) {
    if (mode_.mode != RunMode::Independent || i == pools_[workers_[i].info.pool].first_worker) make_engine(i);
  }
}

WorkerId Fleet::add_worker(std::uint32_t pool, WorkerState state) {
  const Pool& its = pools_[pool];
  Worker& worker = workers_.emplace_back();
  worker.info = {workers_.size() - 1, pool, its.config.role, its.engine->max_num_batched_tokens,
                 its.engine->group_layout()};
  loads_.emplace_back();
  if (net_) net_->add_worker(its.config.role == WorkerRole::Prefill, its.config.role == WorkerRole::Decode);
  config_.router->add_worker(worker.info);
  set_state(worker.info.id, state);
  return worker.info.id;
}

void Fleet::set_state(WorkerId id, WorkerState state) {
  Worker& worker = workers_[id];
  worker.state = state;
  config_.router->set_state(id, state);
  for (const RequestStage stage : {RequestStage::Whole, RequestStage::Prefill, RequestStage::Decode}) {
    std::vector<WorkerId>& ready = ready_[static_cast<std::size_t>(stage)];
    const auto at = std::ranges::lower_bound(ready, id);
    const bool was_ready = at != ready.end() && *at == id;
    const bool is_ready = state == WorkerState::Ready && serves(worker.info.role, stage);
    if (is_ready && !was_ready) ready.insert(at, id);
    if (!is_ready && was_ready) ready.erase(at);
  }
}

RunModeChoice Fleet::choose_mode() const {
  if (independent()) return {RunMode::Independent, "open loop, single turns, a router that looks at requests alone"};
  if (!config_.fast_forward) return {RunMode::Stepwise, "fast-forward is off"};
  if (steps_with_others()) return {RunMode::Stepwise, "ranks step together"};
  if (config_.lockstep_ns > 0) return {RunMode::Stepwise, "steps have a fixed length"};
  if (reports_steps()) return {RunMode::Stepwise, "every step is reported"};
  if (has_user_policies()) return {RunMode::Stepwise, "a user-defined policy sees workers in the order of time"};
  if (config_.router->queues()) return {RunMode::Stepwise, "requests wait in the router for the end of any step"};
  if (net_ && (!aborted_.empty() || config_.disaggregation->transfer_failure_rate > 0))
    return {RunMode::Stepwise, "hand-offs fail, or clients abort them, in any step"};
  if (net_ && has_tiers())
    return {RunMode::Stepwise, "prefill workers load blocks from tiers and keep them for others"};
  if (!shares_tiers() && !has_free_prompts()) {
    return {RunMode::Lookahead, "workers affect each other only when a request ends or a router asks"};
  }
  return {RunMode::Stepwise, "workers affect each other in any step: shared tiers, or prompts that take no time"};
}

EngineSite Fleet::site_of(std::size_t index) {
  Pool& pool = pools_[workers_[index].info.pool];
  EngineSite site;
  site.timing = pool.config.timing;
  site.tiers = pool.config.tiers ? &*pool.config.tiers : nullptr;
  site.run = pool.tiers.get();
  site.name = "worker ";
  site.name += std::to_string(index);
  site.worker = index;
  site.net = net_.get();
  site.pushes = pushes_.get();
  site.gaps = config_.threads > 1 ? nullptr : &columns_.gaps();
  site.keeps_times = true;
  site.fast_forward = config_.fast_forward;
  if (config_.checkpoints) {
    site.on_checkpoint = [this, index](Engine& engine, bool fast_forwarded) {
      config_.checkpoints->reach(index, engine, fast_forwarded);
    };
  }
  if (reports_steps()) {
    site.on_step = [this, index](Engine& engine, bool ended) {
      if (config_.steps) config_.steps->record(index, engine, ended, now_ns_);
      if (config_.on_step) config_.on_step(index, engine, ended);
    };
  }
  return site;
}

void Fleet::make_engine(std::size_t index) {
  std::unique_ptr<Engine>& engine = workers_[index].engine;
  if (steps_with_others()) {
    std::vector<EngineSite> sites;
    for (std::size_t rank = index; rank < index + config_.ranks; ++rank) sites.push_back(site_of(rank));
    engine = config_of(index).make_ranks(sites);
  } else {
    engine = config_of(index).make(site_of(index));
  }
  const EngineSnapshot now = engine->snapshot();
  workers_[index].phase = now.phase;
  workers_[index].wake_ns = now.wake_ns;
}

// One user-defined policy may serve all workers: its calls must be in time order.
bool Fleet::has_user_policies() const {
  return (workers_.size() > 1 || config_.elastic) && std::ranges::any_of(pools_, [](const Pool& pool) {
           return pool.engine->has_user_policy() ||
                  (pool.config.tiers && (pool.config.tiers->filter || pool.config.tiers->g2_policy_is_users));
         });
}

bool Fleet::has_tiers() const {
  return std::ranges::any_of(pools_, [](const Pool& pool) { return pool.config.tiers.has_value(); });
}

bool Fleet::shares_tiers() const {
  return std::ranges::any_of(
      pools_, [](const Pool& pool) { return pool.config.tiers && (pool.config.tiers->g3 || pool.config.tiers->g4); });
}

// A preempted request may return and end at once, in a step that takes no time: no lower bound of its end is known.
bool Fleet::has_free_prompts() const {
  return std::ranges::any_of(pools_, [](const Pool& pool) {
    const StepTiming& timing = pool.config.timing;
    if (timing.charges_first_token) return false;
    const EngineConfig& engine = *pool.engine;
    const std::uint64_t capacity = engine.num_gpu_blocks * engine.block_size;
    // Without a bound of decode steps, as with user-defined models, there is nothing to look ahead by.
    if (timing.least_ns({1, 0, 0}, 1, capacity) <= 0) return true;
    const std::uint64_t longest =
        std::min<std::uint64_t>({capacity, engine.max_num_batched_tokens, engine.max_model_len});
    for (std::uint32_t tokens = 1; tokens <= longest; ++tokens) {
      if (timing.duration_ns(StepLoad::of_prompt(tokens, 0), capacity) == 0) return true;
    }
    return false;
  });
}

// Whether a router can read the workers' blocks instead of receiving events: device blocks only, where nothing else
// needs the events.
bool Fleet::can_show_blocks() const {
  return std::ranges::none_of(config_.pools, [](const WorkerPool& pool) {
    return pool.tiers || pool.engine->publishes_below_device() || pool.engine->events ||
           pool.engine->group_layout() != nullptr;
  });
}

bool Fleet::independent() const {
  return !net_ && !config_.elastic && config_.faults.empty() && !config_.session_policy && aborted_.empty() &&
         !shares_tiers() && !has_user_policies() && config_.concurrency == 0 && workload_.graph.empty() &&
         config_.lockstep_ns == 0 && !steps_with_others() && !reports_steps() && config_.router->blind() &&
         !observes_ && std::ranges::all_of(workload_.next_turn, [](std::int64_t next) { return next < 0; });
}

FleetResult Fleet::run(const Progress& progress) {
  const unsigned threads = config_.threads;
  const bool independent = mode_.mode == RunMode::Independent;
  if (threads < 1) throw Error(ErrorKind::ConfigError, "threads must be at least 1");
  if (threads > 1 && !independent) {
    throw Error(
        ErrorKind::ConfigError,
        "threads > 1 needs independent workers: open loop, single-turn requests, round_robin or random routing, no "
        "tier that they share, no policy of yours, no aborts, no scaler, no faults, and no recording of steps");
  }
  if (!workers_[0].engine) throw Error(ErrorKind::WrongState, "a fleet runs once");
  prepare_columns();
  if (independent) {
    run_independent(threads, progress);
  } else {
    run_together(progress);
  }
  if (config_.checkpoints) config_.checkpoints->finish();
  if (progress) progress(ended_);
  return finish_columns();
}

void Fleet::report(const Progress& progress) {
  if (!progress) return;
  const std::size_t ended = ended_;
  const auto now = std::chrono::steady_clock::now();
  if (ended < reported_ + kReportEvery && now < reported_at_ + kReportAfter) return;
  reported_ = ended;
  reported_at_ = now;
  progress(ended);
}

// ── Requests ──

// Choose the worker of a request, or Router::kLater. A request that can never fit is rejected before it reaches an
// engine; the router is not called for one that fits nowhere.
std::optional<std::size_t> Fleet::route(std::uint64_t row) {
  std::optional<std::string> why;
  for (const Pool& pool : pools_) {
    why = why_not(row, pool);
    if (!why) break;
  }
  const EngineConfig& first = *pools_[0].engine;
  if (why && !first.mocker.route_rejected) {
    reject(row, *why);
    return std::nullopt;
  }
  routed_ = {};
  if (!config_.router->blind() && first.enable_prefix_caching) {
    routed_ = {row, first.block_size, identities_of(row, first)};
  }
  RouteRequest request;
  request.row = row;
  request.session = session_of(row);
  request.parent_session = parent_of(request.session).value_or(RouteRequest::kNoSession);
  request.arrival_ns = arrival_ns_[row];
  request.prompt_tokens = prompt_of(row);
  request.output_tokens = output_of(row);
  request.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  request.strict_priority = workload_.strict_priority.empty() ? 0 : workload_.strict_priority[row];
  request.block_size = first.block_size;
  request.identities = routed_.identities.get();
  stage_ = request.stage;
  const WorkerId worker = config_.router->choose(request, *this);
  if (worker == Router::kLater && config_.router->queues()) return worker;
  if (!std::ranges::binary_search(ready(), worker)) {
    throw Error(ErrorKind::PolicyError, "the router chose worker ", worker, " for row ", row,
                ", which is not ready; choose one of the ", ready().size(), " ids in view.ready");
  }
  return fits(row, worker) ? std::optional(worker) : std::nullopt;
}

std::optional<std::string> Fleet::why_not(std::uint64_t row, const Pool& pool) const {
  return asked_engine(pool).never_fits(prompt_of(row), output_of(row));
}

// Rejects a request that can never fit on its worker; returns whether it can.
bool Fleet::fits(std::uint64_t row, std::size_t worker) {
  const std::optional<std::string> why = why_not(row, pools_[workers_[worker].info.pool]);
  if (why) reject(row, *why);
  return !why;
}

void Fleet::reject(std::uint64_t row, const std::string& why) {
  if (tracks_) config_.router->ended(row);
  rejections_.emplace_back(static_cast<std::int64_t>(row), why);
}

std::shared_ptr<const IdentitySource> Fleet::identities_of(std::uint64_t row, const EngineConfig& engine) const {
  const auto prompt = static_cast<std::uint64_t>(workload_.prompt_tokens[row]);
  const auto output = static_cast<std::uint64_t>(workload_.output_tokens[row]);
  std::uint64_t known = prompt;
  std::uint64_t source = row;
  if (!workload_.output_in_next.empty() && workload_.output_in_next[row]) {
    source = static_cast<std::uint64_t>(workload_.next_turn[row]);
    known += output;
  }
  std::span<const std::uint32_t> exact;
  if (!workload_.output_token_offsets.empty()) {
    const auto begin = static_cast<std::size_t>(workload_.output_token_offsets[row]);
    exact = workload_.output_token_ids.subspan(
        begin, static_cast<std::size_t>(workload_.output_token_offsets[row + 1]) - begin);
  }
  const auto first = static_cast<std::size_t>(workload_.hash_offsets[source]);
  const auto last = static_cast<std::size_t>(workload_.hash_offsets[source + 1]);
  return std::make_shared<TraceIdentities>(
      workload_.hash_ids.subspan(first, last - first), workload_.trace_block_size, known, exact, prompt + output,
      engine.block_size, row, workload_.adapter.empty() ? 0 : static_cast<std::uint32_t>(workload_.adapter[row] + 1),
      engine.hashed_ahead());
}

const Effects& Fleet::submit(std::size_t index, std::uint64_t row, std::int64_t arrival_ns, KvLeg leg) {
  const EngineConfig& engine = config_of(index);
  RequestSpec spec;
  spec.id = row;
  spec.rank = static_cast<std::uint32_t>(index - lead(index));
  const std::uint32_t carried = carried_tokens(row);
  spec.prompt_tokens = prompt_of(row);
  const std::uint32_t output = static_cast<std::uint32_t>(workload_.output_tokens[row]) - carried;
  spec.max_tokens = workload_.limit(row) - carried;
  if (!workload_.max_tokens.empty() && workload_.max_tokens[row] >= 0 && output <= spec.max_tokens)
    spec.eos_at = output;
  if (!workload_.accepted_draft_offsets.empty()) {
    const auto begin = static_cast<std::size_t>(workload_.accepted_draft_offsets[row]);
    const auto end = static_cast<std::size_t>(workload_.accepted_draft_offsets[row + 1]);
    const auto own = workload_.accepted_drafts.subspan(begin, end - begin);
    if (!own.empty()) {
      std::vector<std::uint32_t> accepts(own.begin(), own.end());
      std::rotate(accepts.begin(), accepts.begin() + static_cast<std::ptrdiff_t>(carried % own.size()), accepts.end());
      spec.accepts = std::make_shared<const std::vector<std::uint32_t>>(std::move(accepts));
    }
  }
  spec.leg = leg;
  if (leg == KvLeg::Prefill) {
    spec.max_tokens = 1;
    spec.eos_at = 0;
  } else if (leg == KvLeg::Decode) {
    spec.peer = static_cast<std::uint32_t>(columns_.result().handoff.prefill_worker[row]);
    spec.peer_request = row;
  }
  spec.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  if (!workload_.adapter.empty()) spec.adapter = static_cast<std::uint32_t>(workload_.adapter[row] + 1);
  spec.arrival_time =
      workload_.queue_order.empty() ? static_cast<double>(arrival_ns) : static_cast<double>(workload_.queue_order[row]);
  if (!workload_.names.empty()) {
    spec.name = workload_.names[row];
  } else if (engine.orders_by_name()) {
    spec.name = std::to_string(row);
  }
  if (engine.reads_identities()) {
    const EngineConfig& first = *pools_[0].engine;
    const bool alike = first.block_size == engine.block_size && first.hashed_ahead() == engine.hashed_ahead();
    if (alike && routed_.block_size != 0 && routed_.row == row) {
      spec.identities = std::exchange(routed_, {}).identities;
    } else {
      spec.identities = alike ? identities_of_leg(row, engine) : identities_of(row, engine);
    }
    if (alike && leg == KvLeg::Prefill) prefill_identities_.emplace(row, spec.identities);
  }
  Worker& worker = workers_[index];
  if (worker.first_row == kNoRow) worker.first_row = row;
  const std::uint64_t tokens = tokens_of(row, index);
  const Effects& effects = engine_of(index).submit(std::move(spec), arrival_ns);
  ++loads_[index].outstanding_requests;
  loads_[index].outstanding_tokens += tokens;
  return effects;
}

void Fleet::require_progress(std::size_t index) {
  if (workers_[index].phase != Phase::Stalled) return;
  const Stall stall = workers_[index].engine->stall();
  std::string names;
  for (const Stall::Waiting& waiting : stall.first) {
    if (!names.empty()) names += ", ";
    names += "row " + std::to_string(waiting.request) + " (" + std::to_string(waiting.tokens) + " tokens)";
  }
  const char* why = stall.thrashing ? " requests wait and those that run preempt each other without end, first "
                                    : " requests wait and none can be admitted, first ";
  throw Error(ErrorKind::WrongState, "the run makes no progress: ", stall.waiting, why, names, "; ", stall.free_blocks,
              " of ", config_of(index).num_gpu_blocks, " blocks are free", stall.note);
}

}  // namespace understudy
