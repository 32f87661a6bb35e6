#include "replay/fleet.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <tuple>

#include "replay/trace_identities.hpp"

namespace understudy {

namespace {

constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kReportEvery = 256;  // requests between two calls of the progress hook

}  // namespace

Fleet::Fleet(FleetConfig config, WorkloadColumns workload)
    : config_(std::move(config)),
      workload_(workload),
      arrival_ns_(workload.size(), -1),
      worker_of_(workload.size(), -1),
      random_(config_.seed) {
  if (config_.num_workers < 1) throw Error(ErrorKind::ConfigError, "workers must be at least 1");
  const TierConfig* tiers = config_.tiers ? &*config_.tiers : nullptr;
  if (tiers != nullptr && !independent()) {
    tier_run_ = std::make_unique<TierRun>(*tiers, config_.engine.block_size, config_.engine.events);
  }
  for (std::uint32_t i = 0; i < config_.num_workers; ++i) {
    Worker worker;
    std::string name = "worker ";
    name += std::to_string(i);
    worker.engine = std::make_unique<VllmEngine>(config_.engine, config_.timing, tiers, tier_run_.get(), name);
    worker.engine->set_leaping(config_.leaping && !config_.check);
    worker.engine->set_checking(config_.check);
    workers_.push_back(std::move(worker));
  }
}

bool Fleet::independent() const noexcept {
  const bool shared = config_.tiers && (config_.tiers->g3 || config_.tiers->g4);
  return !shared && config_.concurrency == 0 && config_.routing != Routing::LeastLoaded &&
         std::all_of(workload_.next_turn.begin(), workload_.next_turn.end(), [](std::int64_t n) { return n < 0; });
}

FleetResult Fleet::run(unsigned threads, const Progress& progress) {
  if (threads < 1) throw Error(ErrorKind::ConfigError, "threads must be at least 1");
  if (threads > 1 && !independent()) {
    throw Error(
        ErrorKind::ConfigError,
        "threads > 1 needs independent workers: open loop, single-turn requests, round_robin or random routing, and no "
        "tier that they share");
  }
  if (independent()) {
    run_independent(threads, progress);
  } else {
    run_together(progress);
  }
  return collect();
}

// ── Workers that do not depend on each other ──

void Fleet::run_independent(unsigned threads, const Progress& progress) {
  std::vector<std::uint64_t> order(workload_.size());
  for (std::size_t row = 0; row < order.size(); ++row) order[row] = row;
  std::stable_sort(order.begin(), order.end(), [this](std::uint64_t a, std::uint64_t b) {
    return workload_.arrival_ns[a] < workload_.arrival_ns[b];
  });
  std::vector<std::vector<std::uint64_t>> rows(workers_.size());
  for (const std::uint64_t row : order) {
    arrival_ns_[row] = workload_.arrival_ns[row];
    if (rejected(row)) {
      ++ended_;
      continue;
    }
    const std::size_t worker = route(row);
    worker_of_[row] = static_cast<std::int32_t>(worker);
    rows[worker].push_back(row);
  }

  if (threads <= 1 || workers_.size() == 1) {
    for (std::size_t i = 0; i < workers_.size(); ++i) play_alone(workers_[i], rows[i], progress);
    return;
  }
  std::atomic<std::size_t> next = 0;
  std::mutex failure_mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < workers_.size(); i = next++) {
      try {
        play_alone(workers_[i], rows[i], {});
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::jthread> pool;
  for (unsigned t = 1; t < std::min<std::size_t>(threads, workers_.size()); ++t) pool.emplace_back(work);
  work();
  pool.clear();
  if (failure) std::rethrow_exception(failure);
}

void Fleet::play_alone(Worker& worker, const std::vector<std::uint64_t>& rows, const Progress& progress) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t arrival_ns = workload_.arrival_ns[rows[i]];
    worker.engine->advance(arrival_ns, false);
    if (!worker.engine->in_step()) worker.engine->skip_to(arrival_ns);
    submit(worker, rows[i], arrival_ns);
    if (progress && i % kReportEvery == 0) progress(ended_ + i);
  }
  worker.engine->advance(kForever, false);
  require_progress(worker);
  if (worker.engine->tiers() != nullptr) worker.engine->tiers()->hub().run_until(kForever);  // links drain
  (void)worker.engine->take_finished();
  if (progress) progress(ended_ += rows.size());
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
  TransferHub* const hub = tier_run_ ? &tier_run_->hub() : nullptr;
  open_arrivals();
  std::size_t reported = 0;

  for (;;) {
    const std::int64_t landing_ns = hub != nullptr ? hub->next_wake_ns().value_or(kForever) : kForever;
    const bool over = arrivals_.empty() && ends.empty() && landing_ns == kForever;
    if (over) break;
    const std::int64_t now_ns = std::min({arrivals_.empty() ? kForever : arrivals_.top().time_ns,
                                          ends.empty() ? kForever : std::get<0>(ends.top()), landing_ns});
    touched.clear();
    const auto touch = [&](std::size_t worker) {
      if (marked[worker]) return;
      marked[worker] = true;
      touched.push_back(worker);
    };
    if (landing_ns == now_ns) {
      hub->run_until(now_ns);
      for (const std::size_t index : sleepers) {
        if (workers_[index].engine->roused()) touch(index);
      }
    }
    while (!ends.empty() && std::get<0>(ends.top()) == now_ns) {
      const std::size_t index = std::get<2>(ends.top());
      ends.pop();
      workers_[index].engine->end_step(now_ns);
      if (config_.check) workers_[index].engine->check();
      settle(workers_[index]);
      touch(index);
    }
    while (!arrivals_.empty() && arrivals_.top().time_ns == now_ns) {
      const Arrival arrival = arrivals_.top();
      arrivals_.pop();
      arrive(arrival);
      if (worker_of_[arrival.row] >= 0) touch(static_cast<std::size_t>(worker_of_[arrival.row]));
    }
    std::sort(touched.begin(), touched.end(),
              [this](std::size_t a, std::size_t b) { return order_of(a) < order_of(b); });
    for (const std::size_t index : touched) {
      marked[index] = false;
      VllmEngine& engine = *workers_[index].engine;
      if (engine.in_step() || engine.idle()) continue;
      if (engine.sleeping()) std::erase(sleepers, index);
      const std::int64_t duration_ns = engine.begin_step(now_ns);
      if (engine.stuck()) require_progress(workers_[index]);
      if (engine.sleeping()) {
        sleepers.push_back(index);
      } else {
        ends.push({now_ns + duration_ns, order_of(index), index});
      }
    }
    if (config_.check && tier_run_) tier_run_->check();
    if (progress && ended_ >= reported + kReportEvery) progress(reported = ended_);
  }
  for (const Worker& worker : workers_) require_progress(worker);
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

void Fleet::settle(Worker& worker) {
  for (const RequestId id : worker.engine->take_finished()) {
    const std::uint64_t row = worker.rows[id];
    worker.outstanding_tokens -= static_cast<std::uint64_t>(workload_.prompt_tokens[row]) +
                                 static_cast<std::uint64_t>(workload_.output_tokens[row]);
    after(row, worker.engine->request(id).finish_ns);
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
  const auto why = workers_[0].engine->never_fits(static_cast<std::uint32_t>(workload_.prompt_tokens[row]),
                                                  static_cast<std::uint32_t>(workload_.output_tokens[row]));
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
  spec.max_tokens = output;
  spec.priority = workload_.priority.empty() ? 0 : workload_.priority[row];
  spec.arrival_time = static_cast<double>(arrival_ns);
  if (config_.engine.policy == SchedulingPolicy::Priority) spec.name = std::to_string(row);
  spec.identities =
      std::make_shared<TraceIdentities>(workload_.hash_ids.subspan(first, last - first), workload_.trace_block_size,
                                        known, exact, config_.engine.block_size, row);
  worker.engine->submit(std::move(spec));
  worker.rows.push_back(row);
  worker.outstanding_tokens += std::uint64_t{prompt} + output;
}

void Fleet::require_progress(const Worker& worker) const {
  if (!worker.engine->stuck()) return;
  std::ostringstream who;
  std::size_t named = 0;
  for (const RequestId id : worker.engine->waiting()) {
    if (named++ == 3) break;
    const EngineRequest& request = worker.engine->request(id);
    who << (named > 1 ? ", " : "") << "row " << worker.rows[id] << " (" << request.known << " tokens)";
  }
  const char* why = worker.engine->thrashing()
                        ? " requests wait and those that run preempt each other without end, first "
                        : " requests wait and none can be admitted, first ";
  throw Error(ErrorKind::WrongState, "the run makes no progress: ", worker.engine->waiting().size(), why,
              std::move(who).str(), "; ", worker.engine->store().available(0), " of ", config_.engine.num_gpu_blocks,
              " blocks are free");
}

// ── Columns ──

FleetResult Fleet::collect() {
  const std::size_t n = workload_.size();
  FleetResult out;
  for (auto* column :
       {&out.first_admit_ns, &out.first_token_ns, &out.second_token_ns, &out.last_token_ns, &out.finish_ns}) {
    column->assign(n, -1);
  }
  out.output_tokens.assign(n, 0);
  out.cached_tokens_first.assign(n, 0);
  out.cached_tokens_total.assign(n, 0);
  out.preemptions.assign(n, 0);
  out.fate.assign(n, static_cast<std::uint8_t>(RequestFate::Unfinished));
  std::sort(rejections_.begin(), rejections_.end());
  for (const auto& [row, why] : rejections_) {
    const auto at = static_cast<std::size_t>(row);
    out.fate[at] = static_cast<std::uint8_t>(RequestFate::Rejected);
    out.finish_ns[at] = arrival_ns_[at];
  }
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    const Worker& worker = workers_[index];
    const TokenLog& log = worker.engine->token_log();
    for (RequestId id = 0; id < worker.rows.size(); ++id) {
      const EngineRequest& request = worker.engine->request(id);
      const auto row = static_cast<std::size_t>(worker.rows[id]);
      out.first_admit_ns[row] = request.first_admit_ns;
      out.finish_ns[row] = request.finish_ns;
      out.output_tokens[row] = static_cast<std::int32_t>(request.emitted);
      out.cached_tokens_first[row] = request.cached_first;
      out.cached_tokens_total[row] = static_cast<std::int64_t>(request.cached_total);
      out.preemptions[row] = static_cast<std::int32_t>(request.preemptions);
      if (request.finish_ns >= 0) out.fate[row] = static_cast<std::uint8_t>(RequestFate::Completed);
      if (request.tokens.empty()) continue;
      const auto& runs = request.tokens;
      out.first_token_ns[row] = log.end_of(runs.front().first_step);
      out.last_token_ns[row] = log.end_of(runs.back().first_step + runs.back().count - 1);
      if (runs.front().count > 1) {
        out.second_token_ns[row] = log.end_of(runs.front().first_step + 1);
      } else if (runs.size() > 1) {
        out.second_token_ns[row] = log.end_of(runs[1].first_step);
      }
    }
    for (const EngineSample& sample : log.samples()) {
      out.samples.push_back(sample);
      out.sample_worker.push_back(static_cast<std::int32_t>(index));
    }
    const PoolMetrics metrics = worker.engine->store().metrics(0);
    out.steps += worker.engine->totals().steps;
    out.preempted += worker.engine->totals().preemptions;
    out.phantom_hit_blocks += worker.engine->totals().phantom_hit_blocks;
    out.evictions += metrics.evictions;
    out.stored_blocks += metrics.registrations;
  }
  out.arrival_ns = arrival_ns_;
  out.worker = worker_of_;
  out.rejections = rejections_;
  collect_gaps(out);
  if (config_.tiers) collect_tiers(out);
  return out;
}

void Fleet::collect_tiers(FleetResult& out) const {
  const std::size_t n = workload_.size();
  for (auto* columns : {&out.below_tokens_first, &out.below_tokens_total}) {
    for (std::vector<std::int64_t>& column : *columns) column.assign(n, 0);
  }
  out.parked_ns.assign(n, 0);
  out.room_wait_ns.assign(n, 0);
  const auto add = [&out](Tier tier, const PoolMetrics& m) {
    auto found = std::find_if(out.tiers.begin(), out.tiers.end(), [&](const TierSummary& t) { return t.tier == tier; });
    if (found == out.tiers.end()) found = out.tiers.insert(out.tiers.end(), TierSummary{tier, 0, 0, 0, 0});
    found->capacity_blocks += m.total_blocks;
    found->resident_blocks += m.active_blocks + m.inactive_blocks;
    found->stored_blocks += m.registrations;
    found->evicted_blocks += m.evictions;
  };
  const auto add_run = [&](const TierRun& run) {
    for (const auto& shared : run.shared()) add(shared->tier(), shared->store().metrics(0));
    const Links& links = run.hub().links();
    for (LinkId id = 0; id < links.num_links(); ++id) out.links.push_back(links.usage(id));
  };
  for (const Worker& worker : workers_) {
    const VllmEngine& engine = *worker.engine;
    const WorkerTiers& tiers = *engine.tiers();
    for (RequestId id = 0; id < worker.rows.size(); ++id) {
      const EngineRequest& request = engine.request(id);
      const auto row = static_cast<std::size_t>(worker.rows[id]);
      for (std::size_t below = 0; below < 3; ++below) {
        out.below_tokens_first[below][row] = request.below_first[below];
        out.below_tokens_total[below][row] = static_cast<std::int64_t>(request.below_total[below]);
      }
      out.parked_ns[row] = request.parked_ns;
      out.room_wait_ns[row] = tiers.waited_ns(id);
    }
    add(Tier::G1, engine.store().metrics(0));
    add(Tier::G2, engine.store().metrics(1));
    out.onboard_ns.insert(out.onboard_ns.end(), tiers.onboard_ns().begin(), tiers.onboard_ns().end());
    out.tier_totals += tiers.totals();
    if (engine.own_run() != nullptr) add_run(*engine.own_run());
  }
  if (tier_run_) add_run(*tier_run_);
}

// Ascending and without repeats, by least significant digit first: there are millions. A gap below 2^32 ns (4.3 s) and
// its count share a word.
void Fleet::collect_gaps(FleetResult& out) const {
  constexpr std::int64_t kShort = std::int64_t{1} << 32;
  std::vector<std::uint64_t> from;
  std::map<std::int64_t, std::int64_t> others;
  for (const Worker& worker : workers_) {
    worker.engine->token_log().for_each_gap([&](std::int64_t ns, std::int64_t count) {
      if (ns < kShort && count < kShort) {
        from.push_back((static_cast<std::uint64_t>(ns) << 32) | static_cast<std::uint64_t>(count));
      } else {
        others[ns] += count;
      }
    });
  }
  std::vector<std::uint64_t> to(from.size());
  constexpr unsigned kBits = 11;
  for (unsigned shift = 32; shift < 64; shift += kBits) {
    std::array<std::size_t, (1u << kBits) + 1> start{};
    const auto digit = [shift](std::uint64_t gap) { return (gap >> shift) & ((1u << kBits) - 1); };
    for (const std::uint64_t gap : from) ++start[digit(gap) + 1];
    for (std::size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
    for (const std::uint64_t gap : from) to[start[digit(gap)]++] = gap;
    from.swap(to);
  }
  for (const std::uint64_t gap : from) {
    const auto ns = static_cast<std::int64_t>(gap >> 32);
    const auto count = static_cast<std::int64_t>(gap & 0xFFFFFFFFu);
    if (!out.gap_ns.empty() && out.gap_ns.back() == ns) {
      out.gap_count.back() += count;
    } else {
      out.gap_ns.push_back(ns);
      out.gap_count.push_back(count);
    }
  }
  for (const auto& [ns, count] : others) {
    const auto at = std::lower_bound(out.gap_ns.begin(), out.gap_ns.end(), ns);
    const auto index = at - out.gap_ns.begin();
    if (at != out.gap_ns.end() && *at == ns) {
      out.gap_count[static_cast<std::size_t>(index)] += count;
    } else {
      out.gap_ns.insert(at, ns);
      out.gap_count.insert(out.gap_count.begin() + index, count);
    }
  }
}

}  // namespace understudy
