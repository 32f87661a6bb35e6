#include "replay/fleet.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

#include "replay/trace_identities.hpp"

namespace understudy {

namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

}  // namespace

Fleet::Fleet(FleetConfig config, WorkloadColumns workload)
    : config_(std::move(config)),
      workload_(workload),
      arrival_ns_(workload.size(), -1),
      worker_of_(workload.size(), -1),
      random_(config_.seed) {
  if (config_.num_workers < 1) throw Error(ErrorKind::ConfigError, "workers must be at least 1");
  config_.engine.check = config_.check;
  const TierConfig* tiers = config_.tiers ? &*config_.tiers : nullptr;
  if (tiers != nullptr && config_.lockstep_ns > 0) {
    throw Error(ErrorKind::ConfigError,
                "tiers contradict lockstep, whose steps have one length whatever is on its way");
  }
  if (tiers != nullptr && !independent()) {
    tier_run_ = std::make_unique<TierRun>(*tiers, config_.engine.block_size, config_.engine.events, config_.check);
  }
  workers_.resize(config_.num_workers);
  // Those who do not meet are played one after another, and need memory only while they are.
  make_engine(0);
  // A user's policies are made in order, and before the run.
  const bool at_once = !independent() || (tiers != nullptr && workers_[0].engine->store().advised(1));
  for (std::size_t i = 1; at_once && i < workers_.size(); ++i) make_engine(i);
}

void Fleet::make_engine(std::size_t index) {
  EngineConfig config = config_.engine;
  config.burst_seed += index;  // streams of their own
  config.speculation.seed += index;
  std::string name = "worker ";
  name += std::to_string(index);
  const TierConfig* tiers = config_.tiers ? &*config_.tiers : nullptr;
  auto engine = std::make_unique<VllmEngine>(config, config_.timing, tiers, tier_run_.get(), name);
  engine->set_leaping(config_.leaping && !config_.on_step);
  if (config_.on_step) {
    engine->set_observer([this, index, it = engine.get()](bool ended) { config_.on_step(index, *it, ended); });
  }
  workers_[index].engine = std::move(engine);
}

bool Fleet::independent() const noexcept {
  const bool shared = config_.tiers && (config_.tiers->g3 || config_.tiers->g4);
  return !shared && config_.concurrency == 0 && config_.lockstep_ns == 0 && !config_.on_step &&
         config_.routing != Routing::LeastLoaded &&
         std::all_of(workload_.next_turn.begin(), workload_.next_turn.end(), [](std::int64_t n) { return n < 0; });
}

FleetResult Fleet::run(unsigned threads, const Progress& progress) {
  if (threads < 1) throw Error(ErrorKind::ConfigError, "threads must be at least 1");
  if (threads > 1 && !independent()) {
    throw Error(
        ErrorKind::ConfigError,
        "threads > 1 needs independent workers: open loop, single-turn requests, round_robin or random routing, no "
        "tier that they share, and no recording of steps");
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

// ── Workers that meet: sessions, a cap on concurrency, or routing by load ──

void Fleet::open_arrivals() {
  for (std::uint64_t row = 0; row < workload_.size(); ++row) {
    if (workload_.turn[row] != 0) continue;
    if (config_.concurrency == 0) {
      arrivals_.push({workload_.arrival_ns[row], row});
    } else {
      sessions_.push_back(row);
    }
  }
  for (; next_session_ < std::min<std::size_t>(config_.concurrency, sessions_.size()); ++next_session_) {
    arrivals_.push({0, sessions_[next_session_]});
  }
}

// Among workers at one time, whoever got the earliest request goes first: not a matter of how workers are numbered.
std::uint64_t Fleet::order_of(std::size_t worker) const {
  const std::vector<std::uint64_t>& rows = workers_[worker].rows;
  return rows.empty() ? workload_.size() + worker : rows.front();
}

// At one time: transfers land, steps end, requests arrive, and then workers that are free begin a step. A worker that
// steps is in the heap once.
void Fleet::run_together(const Progress& progress) {
  using Event = std::tuple<std::int64_t, std::uint64_t, std::size_t>;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> ends;
  std::vector<std::size_t> touched;
  std::vector<std::size_t> sleepers;
  std::vector<bool> marked(workers_.size(), false);
  std::uint64_t rounds = 0;
  TransferHub* const hub = tier_run_ ? &tier_run_->hub() : nullptr;
  open_arrivals();
  // In lockstep every worker begins at 0, and again whenever a step of its has ended.
  const bool lockstep = config_.lockstep_ns > 0;
  bool first = lockstep;

  for (;;) {
    const std::int64_t landing_ns = hub != nullptr ? hub->next_wake_ns().value_or(kForever) : kForever;
    std::int64_t now_ns = std::min({arrivals_.empty() ? kForever : arrivals_.top().time_ns,
                                    ends.empty() ? kForever : std::get<0>(ends.top()), landing_ns});
    if (first) now_ns = 0;
    if (now_ns == kForever) break;
    touched.clear();
    const auto touch = [&](std::size_t worker) {
      if (marked[worker]) return;
      marked[worker] = true;
      touched.push_back(worker);
    };
    if (landing_ns == now_ns) {
      hub->run_until(now_ns);
      for (const std::size_t index : sleepers) {
        if (workers_[index].engine->landed(now_ns)) touch(index);
      }
    }
    while (!ends.empty() && std::get<0>(ends.top()) == now_ns) {
      const std::size_t index = std::get<2>(ends.top());
      ends.pop();
      settle(workers_[index], workers_[index].engine->end_step(now_ns));
      touch(index);
    }
    while (!arrivals_.empty() && arrivals_.top().time_ns == now_ns) {
      const Arrival arrival = arrivals_.top();
      arrivals_.pop();
      arrive(arrival);
      if (worker_of_[arrival.row] >= 0) touch(static_cast<std::size_t>(worker_of_[arrival.row]));
    }
    for (std::size_t index = 0; first && index < workers_.size(); ++index) touch(index);
    first = false;
    std::sort(touched.begin(), touched.end(),
              [this](std::size_t a, std::size_t b) { return order_of(a) < order_of(b); });
    for (const std::size_t index : touched) {
      marked[index] = false;
      VllmEngine& engine = *workers_[index].engine;
      if (engine.in_step() || (engine.idle() && !(lockstep && ended_ < workload_.size()))) continue;
      if (engine.asleep()) std::erase(sleepers, index);
      const std::int64_t duration_ns = engine.begin_step(now_ns);
      if (engine.stuck()) require_progress(workers_[index]);
      if (engine.asleep()) {
        sleepers.push_back(index);
      } else {
        ends.push({now_ns + (lockstep ? config_.lockstep_ns : duration_ns), order_of(index), index});
      }
    }
    if (config_.check && tier_run_) tier_run_->check();
    if (++rounds % 64 == 0) report(progress);
  }
  for (Worker& worker : workers_) {
    require_progress(worker);
    worker.engine->drain_transfers();
    worker.gaps = worker.engine->take_gaps();
  }
  for (std::size_t index = 0; index < workers_.size(); ++index) collect(index);
}

void Fleet::arrive(Arrival arrival) {
  arrival_ns_[arrival.row] = arrival.time_ns;
  if (rejected(arrival.row)) {
    after(arrival.row, arrival.time_ns);
    return;
  }
  const std::size_t index = route(arrival.row);
  worker_of_[arrival.row] = static_cast<std::int32_t>(index);
  submit(workers_[index], arrival.row, arrival.time_ns);
}

void Fleet::settle(Worker& worker, const StepEffects& effects) {
  for (const RequestRecord& record : effects.finished) {
    const std::uint64_t row = worker.rows[record.id];
    keep(row, record);
    worker.outstanding_tokens -= static_cast<std::uint64_t>(workload_.prompt_tokens[row]) +
                                 static_cast<std::uint64_t>(workload_.output_tokens[row]);
    after(row, record.finish_ns);
  }
}

// A turn has ended: its session goes on, or makes room for another.
void Fleet::after(std::uint64_t row, std::int64_t time_ns) {
  ++ended_;
  if (workload_.next_turn[row] >= 0) {
    const auto next = static_cast<std::uint64_t>(workload_.next_turn[row]);
    arrivals_.push({time_ns + workload_.delay_ns[next], next});
  } else if (config_.concurrency > 0 && next_session_ < sessions_.size()) {
    arrivals_.push({time_ns, sessions_[next_session_++]});
  }
}

// ── Requests ──

std::size_t Fleet::route(std::uint64_t) {
  switch (config_.routing) {
    case Routing::RoundRobin:
      return next_worker_++ % workers_.size();
    case Routing::Random:
      return static_cast<std::size_t>(random_() % workers_.size());
    case Routing::LeastLoaded:
      break;
  }
  const auto least = std::min_element(workers_.begin(), workers_.end(), [](const Worker& a, const Worker& b) {
    return a.outstanding_tokens < b.outstanding_tokens;
  });
  return static_cast<std::size_t>(least - workers_.begin());
}

// A request that can never fit is rejected in front of the engines, and the rest go on.
bool Fleet::rejected(std::uint64_t row) {
  const auto why = workers_[0].engine->never_fits(
      static_cast<std::uint32_t>(workload_.prompt_tokens[row]),
      std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row])));
  if (why) rejections_.emplace_back(static_cast<std::int64_t>(row), *why);
  return why.has_value();
}

void Fleet::submit(Worker& worker, std::uint64_t row, std::int64_t arrival_ns) {
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const auto output = static_cast<std::uint32_t>(workload_.output_tokens[row]);
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
  RequestSpec spec;
  spec.prompt_tokens = prompt;
  spec.max_tokens = workload_.limit(row);
  if (!workload_.max_tokens.empty() && workload_.max_tokens[row] >= 0 && output <= spec.max_tokens)
    spec.eos_at = output;
  if (!workload_.accepted_draft_offsets.empty() && config_.engine.speculation.tokens > 0) {
    const auto begin = static_cast<std::size_t>(workload_.accepted_draft_offsets[row]);
    const auto end = static_cast<std::size_t>(workload_.accepted_draft_offsets[row + 1]);
    const auto own = workload_.accepted_drafts.subspan(begin, end - begin);
    if (!own.empty()) spec.accepts = std::make_shared<const std::vector<std::uint32_t>>(own.begin(), own.end());
  }
  spec.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  spec.arrival_time =
      workload_.queue_order.empty() ? static_cast<double>(arrival_ns) : static_cast<double>(workload_.queue_order[row]);
  if (!workload_.names.empty()) {
    spec.name = workload_.names[row];
  } else if (config_.engine.policy == SchedulingPolicy::Priority) {
    spec.name = std::to_string(row);
  }
  if (config_.engine.enable_prefix_caching) {
    spec.identities =
        std::make_shared<TraceIdentities>(workload_.hash_ids.subspan(first, last - first), workload_.trace_block_size,
                                          known, exact, std::uint64_t{prompt} + output, config_.engine.block_size, row);
  }
  worker.engine->submit(std::move(spec));
  worker.rows.push_back(row);
  worker.outstanding_tokens += std::uint64_t{prompt} + output;
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
  throw Error(ErrorKind::WrongState, "the run makes no progress: ", stall.waiting, why, who, "; ", stall.free_blocks,
              " of ", config_.engine.num_gpu_blocks, " blocks are free");
}

}  // namespace understudy
