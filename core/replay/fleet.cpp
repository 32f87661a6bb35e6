#include "replay/fleet.hpp"

#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"
#include "replay/trace_identities.hpp"

namespace understudy {

Fleet::Fleet(FleetConfig config, WorkloadColumns workload)
    : config_(std::move(config)),
      workload_(workload),
      looks_(config_.router->reads_residency() && can_be_looked_at()),
      observes_(config_.router->observes() && !looks_),
      tracks_(config_.router->tracks()),
      started_(tracks_ ? workload.size() : 0),
      arrival_ns_(workload.size(), -1),
      worker_of_(workload.size(), -1) {
  if (config_.pools.empty()) throw Error(ErrorKind::ConfigError, "a fleet needs at least one pool");
  for (WorkerPool& pool : config_.pools) {
    if (pool.num_workers < 1) throw Error(ErrorKind::ConfigError, "workers must be at least 1");
    if (pool.tiers && config_.lockstep_ns > 0) {
      throw Error(ErrorKind::ConfigError,
                  "tiers contradict lockstep, whose steps have one length whatever is on its way");
    }
    pool.engine.check = config_.check;
    keeps_events_ = keeps_events_ || pool.engine.events;
    pool.engine.events = pool.engine.events || observes_;
    pool.engine.known_blocks = looks_;
    Pool& added = pools_.emplace_back();
    added.config = pool;
    added.first_worker = workers_.size();
    for (std::uint32_t i = 0; i < pool.num_workers; ++i) {
      workers_.emplace_back().pool = static_cast<std::uint32_t>(pools_.size() - 1);
    }
  }
  loads_.resize(workers_.size());
  std::vector<std::uint64_t> batch_tokens;
  for (const Worker& worker : workers_) {
    batch_tokens.push_back(pools_[worker.pool].config.engine.max_num_batched_tokens);
  }
  config_.router->begin(batch_tokens);
  std::vector<std::uint32_t> pool_of;
  for (const Worker& worker : workers_) pool_of.push_back(worker.pool);
  config_.router->set_pools(pool_of);
  if (std::ranges::any_of(workload_.next_turn, [](std::int64_t next) { return next >= 0; })) {
    session_.resize(workload_.size());
    for (std::uint64_t row = 0; row < workload_.size(); ++row) {
      if (workload_.turn[row] != 0) continue;
      for (auto at = static_cast<std::int64_t>(row); at >= 0; at = workload_.next_turn[static_cast<std::size_t>(at)]) {
        session_[static_cast<std::size_t>(at)] = row;
      }
    }
  }
  stepping_ = !config_.leaping || config_.ranks || config_.lockstep_ns > 0 || config_.on_step || user_policies() ||
              shares_tiers() || free_prompts() || (config_.check && observes_) || config_.router->queues();
  resting_ = stepping_ && config_.leaping && !config_.ranks && config_.lockstep_ns == 0 && !config_.on_step &&
             !user_policies() && !config_.check && !observes_ && !looks_ && !config_.router->queues();
  unseen_ = !stepping_ && !observes_ && !looks_ && !tracks_ && !config_.router->asks_workers();
  for (Pool& pool : pools_) {
    const TierConfig* tiers = pool.config.tiers ? &*pool.config.tiers : nullptr;
    if (tiers == nullptr || independent() || (!stepping_ && !tiers->g3 && !tiers->g4)) continue;
    const EngineConfig& engine = pool.config.engine;
    pool.tiers =
        std::make_unique<TierRun>(*tiers, engine.block_size, engine.events, engine.check, &hub_, pool.config.name);
    pool.shared_events.resize(pool.tiers->shared().size());
  }
  // Those who do not meet are played one after another, and need memory only while they are.
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (!independent() || i == pools_[workers_[i].pool].first_worker) make_engine(i);
  }
}

void Fleet::make_engine(std::size_t index) {
  Pool& pool = pools_[workers_[index].pool];
  EngineConfig config = pool.config.engine;
  config.burst_seed += index;  // streams of their own
  config.speculation.seed += index;
  std::string name = "worker ";
  name += std::to_string(index);
  const TierConfig* tiers = pool.config.tiers ? &*pool.config.tiers : nullptr;
  auto engine = std::make_unique<VllmEngine>(config, pool.config.timing, tiers, pool.tiers.get(), name);
  engine->keep_times();
  if (!independent()) engine->share_gaps(columns_.gaps());
  engine->set_leaping(config_.leaping && !config_.on_step);
  if (config_.on_step) {
    engine->set_observer([this, index, it = engine.get()](bool ended) { config_.on_step(index, *it, ended); });
  }
  if (resting_ && engine->tiers() != nullptr) {
    engine->tiers()->set_before_landing(
        [this, index](std::int64_t, bool samples_only) { samples_only ? rest_on(index) : rouse(index, true); });
  }
  workers_[index].engine = std::move(engine);
}

// Policies of the user's may be one object for all workers: it sees what happens in the order in which it happens.
bool Fleet::user_policies() const noexcept {
  return workers_.size() > 1 && std::ranges::any_of(pools_, [](const Pool& pool) {
           return pool.config.engine.eviction_is_users ||
                  (pool.config.tiers && (pool.config.tiers->filter || pool.config.tiers->g2_policy_is_users));
         });
}

bool Fleet::shares_tiers() const noexcept {
  return std::ranges::any_of(
      pools_, [](const Pool& pool) { return pool.config.tiers && (pool.config.tiers->g3 || pool.config.tiers->g4); });
}

// Who is preempted may come back and end at once, in a step that takes no time: nobody can say before when nobody ends.
bool Fleet::free_prompts() const {
  return std::ranges::any_of(pools_, [](const Pool& pool) {
    const StepTiming& timing = pool.config.timing;
    const EngineConfig& engine = pool.config.engine;
    return !timing.charges_first_token &&
           timing.duration_ns(StepLoad::of_prompt(1, 0), engine.num_gpu_blocks * engine.block_size) == 0;
  });
}

// Whether a router can be shown what workers hold, instead of being told: on their devices alone. Somebody else's
// events are made anyway; and a check is of events.
bool Fleet::can_be_looked_at() const noexcept {
  return !config_.check && std::ranges::none_of(config_.pools, [](const WorkerPool& pool) {
    return pool.tiers || pool.engine.offload || pool.engine.events;
  });
}

bool Fleet::independent() const noexcept {
  return !shares_tiers() && !user_policies() && config_.concurrency == 0 && config_.lockstep_ns == 0 &&
         !config_.ranks && !config_.on_step && config_.router->blind() && !observes_ &&
         std::ranges::all_of(workload_.next_turn, [](std::int64_t next) { return next < 0; });
}

FleetResult Fleet::run(const Progress& progress) {
  const unsigned threads = config_.threads;
  if (threads < 1) throw Error(ErrorKind::ConfigError, "threads must be at least 1");
  if (threads > 1 && !independent()) {
    throw Error(
        ErrorKind::ConfigError,
        "threads > 1 needs independent workers: open loop, single-turn requests, round_robin or random routing, no "
        "tier that they share, no policy of yours, and no recording of steps");
  }
  if (!workers_[0].engine) throw Error(ErrorKind::WrongState, "a fleet runs once");
  prepare_columns();
  if (independent()) {
    run_independent(threads, progress);
  } else {
    run_together(progress);
  }
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

// The worker of a request, or Router::kLater. One that can never fit where it would be served is rejected in front of
// the engines, and the rest go on; a router is not asked about what fits nowhere.
std::optional<std::size_t> Fleet::route(std::uint64_t row) {
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t output = std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row]));
  std::optional<std::string> why;
  for (const Pool& pool : pools_) {
    why = why_not(row, pool);
    if (!why) break;
  }
  if (why && !config_.route_rejected) {
    reject(row, *why);
    return std::nullopt;
  }
  const EngineConfig& first = pools_[0].config.engine;
  asked_ = {};
  if (!config_.router->blind() && first.enable_prefix_caching) {
    asked_ = {row, first.block_size, identities_of(row, first.block_size)};
  }
  const std::size_t worker = config_.router->choose(
      {row, session_of(row), arrival_ns_[row], prompt, output, workload_.priority.empty() ? 0 : workload_.priority[row],
       workload_.strict_priority.empty() ? 0 : workload_.strict_priority[row], first.block_size,
       asked_.identities.get()},
      *this);
  if (worker == Router::kLater && config_.router->queues()) return worker;
  if (worker >= workers_.size()) {
    throw Error(ErrorKind::PolicyError, "the router chose worker ", worker, " for row ", row, "; there are ",
                workers_.size());
  }
  return fits(row, worker) ? std::optional(worker) : std::nullopt;
}

std::optional<std::string> Fleet::why_not(std::uint64_t row, const Pool& pool) const {
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t output = std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row]));
  return workers_[pool.first_worker].engine->never_fits(prompt, output);
}

// Whether a request can be served where it was sent; else it is rejected.
bool Fleet::fits(std::uint64_t row, std::size_t worker) {
  const std::optional<std::string> why = why_not(row, pools_[workers_[worker].pool]);
  if (why) reject(row, *why);
  return !why;
}

void Fleet::reject(std::uint64_t row, const std::string& why) {
  if (tracks_) config_.router->ended(row);
  rejections_.emplace_back(static_cast<std::int64_t>(row), why);
}

std::shared_ptr<const IdentitySource> Fleet::identities_of(std::uint64_t row, std::uint32_t block_size) const {
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
      block_size, row, workload_.adapter.empty() ? 0 : static_cast<std::uint32_t>(workload_.adapter[row] + 1));
}

void Fleet::submit(std::size_t index, std::uint64_t row, std::int64_t arrival_ns) {
  Worker& worker = workers_[index];
  const EngineConfig& engine = pools_[worker.pool].config.engine;
  RequestSpec spec;
  spec.prompt_tokens = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const auto output = static_cast<std::uint32_t>(workload_.output_tokens[row]);
  spec.max_tokens = workload_.limit(row);
  if (!workload_.max_tokens.empty() && workload_.max_tokens[row] >= 0 && output <= spec.max_tokens)
    spec.eos_at = output;
  if (!workload_.accepted_draft_offsets.empty() && engine.speculation.tokens > 0) {
    const auto begin = static_cast<std::size_t>(workload_.accepted_draft_offsets[row]);
    const auto end = static_cast<std::size_t>(workload_.accepted_draft_offsets[row + 1]);
    const auto own = workload_.accepted_drafts.subspan(begin, end - begin);
    if (!own.empty()) spec.accepts = std::make_shared<const std::vector<std::uint32_t>>(own.begin(), own.end());
  }
  spec.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  if (!workload_.adapter.empty()) spec.adapter = static_cast<std::uint32_t>(workload_.adapter[row] + 1);
  spec.arrival_time =
      workload_.queue_order.empty() ? static_cast<double>(arrival_ns) : static_cast<double>(workload_.queue_order[row]);
  if (!workload_.names.empty()) {
    spec.name = workload_.names[row];
  } else if (engine.policy == SchedulingPolicy::Priority) {
    spec.name = std::to_string(row);
  }
  if (engine.enable_prefix_caching || engine.offload) {
    const bool known = asked_.block_size == engine.block_size && asked_.row == row;
    spec.identities = known ? std::exchange(asked_, {}).identities : identities_of(row, engine.block_size);
  }
  const std::uint64_t tokens = std::uint64_t{spec.prompt_tokens} + output;
  worker.engine->submit(std::move(spec));
  worker.rows.push_back(row);
  ++loads_[index].outstanding_requests;
  loads_[index].outstanding_tokens += tokens;
}

void Fleet::require_progress(const Worker& worker) const {
  if (!worker.engine->stuck()) return;
  const Stall stall = worker.engine->stall();
  std::string who;
  for (const Stall::Waiting& waiting : stall.first) {
    if (!who.empty()) who += ", ";
    who += "row " + std::to_string(worker.rows[waiting.request]) + " (" + std::to_string(waiting.tokens) + " tokens)";
  }
  const char* why = stall.thrashing ? " requests wait and those that run preempt each other without end, first "
                                    : " requests wait and none can be admitted, first ";
  const EngineConfig& engine = pools_[worker.pool].config.engine;
  std::string defect;
  if (stall.holders_starve) {
    defect =
        "; one that finds no room stands before others that hold blocks which were loaded for them: a defect of "
        "the offload of vLLM " +
        engine.offload->release + ", not of the run; vLLM 0.31 and later serve those first";
  }
  throw Error(ErrorKind::WrongState, "the run makes no progress: ", stall.waiting, why, who, "; ", stall.free_blocks,
              " of ", engine.num_gpu_blocks, " blocks are free", defect);
}

}  // namespace understudy
