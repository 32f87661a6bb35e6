// What a run leaves: columns of its requests, gaps, samples, tiers and links.
#include <algorithm>
#include <functional>
#include <utility>

#include "replay/fleet.hpp"

namespace understudy {

namespace {

template <typename T>
void fill(std::vector<T>& column, std::size_t rows, int value) {
  column.assign(rows, static_cast<T>(value));
}

template <typename T, std::size_t kParts>
void fill(std::array<std::vector<T>, kParts>& columns, std::size_t rows, int value) {
  for (std::vector<T>& column : columns) fill(column, rows, value);
}

template <typename T, typename Value>
void set(std::vector<T>& column, std::uint64_t row, Value value) {
  column[row] = static_cast<T>(value);
}

template <typename T, std::size_t kParts, typename Value>
void set(std::array<std::vector<T>, kParts>& columns, std::uint64_t row, const std::array<Value, kParts>& values) {
  for (std::size_t part = 0; part < kParts; ++part) set(columns[part], row, values[part]);
}

}  // namespace

void Fleet::prepare_columns() {
  const auto prepare = [this](const auto& column) { fill(result_.*column.kept, workload_.size(), column.none); };
  for_each_line(kRecordColumns, prepare);
  if (std::ranges::none_of(pools_, [](const Pool& pool) { return pool.config.tiers.has_value(); })) return;
  for_each_line(kTierRecordColumns, prepare);
}

void Fleet::collect(std::size_t index) {
  Worker& worker = workers_[index];
  VllmEngine& engine = *worker.engine;
  FleetResult& out = result_;
  if (config_.check) engine.check();
  if (keeps_events_) {
    keep_events(worker, gathered_);
    out.events.push_back(std::move(worker.events));
  }
  if (pools_[worker.pool].config.engine.kv_trace) out.kv_trace.push_back(engine.take_kv_trace());
  for (const EngineSample& sample : engine.samples()) {
    out.samples.push_back(sample);
    out.sample_worker.push_back(static_cast<std::int32_t>(index));
  }
  const EngineSnapshot end = engine.snapshot();
  for_each_line(kTotals, [&](const auto& total) { out.totals.*total.member += end.totals.*total.member; });
  out.evictions += end.evictions;
  out.stored_blocks += end.stored_blocks;
  if (engine.tiers() != nullptr) collect_tiers(worker);
  add_gaps(std::move(worker.gaps));
  worker.engine.reset();
}

void Fleet::keep(const Worker& worker, const RequestRecord& record) {
  const std::uint64_t row = worker.rows[record.id];
  const WorkerPool& pool = pools_[worker.pool].config;
  const auto write = [&](const auto& column) { set(result_.*column.kept, row, std::invoke(column.of, record)); };
  for_each_line(kRecordColumns, write);
  const auto asked = std::min(static_cast<std::uint32_t>(workload_.output_tokens[row]), workload_.limit(row));
  const auto prompt = static_cast<std::uint32_t>(workload_.prompt_tokens[row]);
  const std::uint32_t expected = std::min(asked, pool.engine.max_model_len - prompt);
  if (config_.check && record.output_tokens != expected) {
    throw Error(ErrorKind::InvariantViolated, "row ", row, " emitted ", record.output_tokens, " of ", expected,
                " tokens");
  }
  if (pool.tiers) for_each_line(kTierRecordColumns, write);
}

void Fleet::keep_events(Worker& worker, TimedEvents& room) {
  worker.engine->take_events(room);
  worker.events.append(room);
}

void Fleet::collect_tiers(const Worker& worker) {
  VllmEngine& engine = *worker.engine;
  const WorkerTiers& tiers = *engine.tiers();
  FleetResult& out = result_;
  add_tier(Tier::G1, engine.store().num_blocks(0), engine.store().metrics(0));
  std::uint64_t host_blocks = tiers.config().g2_blocks;
  PoolMetrics host = engine.store().metrics(1);
  TierTotals totals = tiers.totals();
  if (const OffloadConnector* const offload = engine.offload()) {
    const std::uint64_t chunk = offload->config().blocks_per_chunk;
    for (std::uint64_t* const count :
         {&host.active_blocks, &host.inactive_blocks, &host.registrations, &host.evictions}) {
      *count *= chunk;
    }
    host_blocks = offload->host().capacity() * chunk;
    const OffloadTotals& done = offload->totals();
    totals.offloaded_blocks = done.stored_chunks * chunk;
    totals.onboards = done.loads;
    totals.onboarded_blocks = done.loaded_tokens / engine.config().block_size;
    totals.deferred_lookups = done.deferred_lookups;
    totals.refused_stores = done.refused_stores;
    totals.flushed_copies = done.flushed_jobs;
    const std::vector<std::int64_t>& load_ns = engine.offload_links()->load_ns();
    out.onboard_ns.insert(out.onboard_ns.end(), load_ns.begin(), load_ns.end());
  }
  add_tier(Tier::G2, host_blocks, host);
  out.onboard_ns.insert(out.onboard_ns.end(), tiers.onboard_ns().begin(), tiers.onboard_ns().end());
  out.tier_totals += totals;
  if (engine.own_run() != nullptr) {
    add_shared(engine.own_run()->shared(), {});
    add_links(engine.own_run()->hub().links());
  }
}

void Fleet::add_tier(Tier tier, std::uint64_t capacity_blocks, const PoolMetrics& metrics) {
  std::vector<TierSummary>& tiers = result_.tiers;
  auto found = std::find_if(tiers.begin(), tiers.end(), [&](const TierSummary& t) { return t.tier == tier; });
  if (found == tiers.end()) found = tiers.insert(tiers.end(), TierSummary{tier, 0, 0, 0, 0, {}, {}});
  found->capacity_blocks += capacity_blocks;
  found->resident_blocks += metrics.active_blocks + metrics.inactive_blocks;
  found->stored_blocks += metrics.registrations;
  found->evicted_blocks += metrics.evictions;
}

void Fleet::add_shared(const std::vector<std::unique_ptr<SharedTier>>& tiers, std::span<EventTable> told) {
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    SharedTier& shared = *tiers[i];
    add_tier(shared.tier(), shared.config().num_blocks, shared.store().metrics(0));
    result_.tiers.back().residency = shared.residency();
    if (!keeps_events_) continue;
    EventTable& all = result_.tiers.back().events;
    if (!told.empty()) all = std::move(told[i]);
    shared.take_events(gathered_);
    all.append(gathered_);
  }
}

void Fleet::add_links(const Links& links) {
  for (LinkId id = 0; id < links.num_links(); ++id) result_.links.push_back(links.usage(id));
}

FleetResult Fleet::finish_columns() {
  std::sort(rejections_.begin(), rejections_.end());
  for (const auto& [row, why] : rejections_) {
    const auto at = static_cast<std::size_t>(row);
    result_.fate[at] = static_cast<std::uint8_t>(RequestFate::Rejected);
    result_.finish_ns[at] = arrival_ns_[at];
  }
  result_.arrival_ns = arrival_ns_;
  result_.worker = worker_of_;
  result_.rejections = rejections_;
  for (Pool& pool : pools_) {
    if (!pool.tiers) continue;
    if (config_.check) pool.tiers->check(true);
    add_shared(pool.tiers->shared(), pool.shared_events);
  }
  add_links(hub_.links());
  while (gaps_.size() > 1) merge_last_gaps();
  result_.gap_ns.reserve(gaps_.front().size());  // there is a worker
  result_.gap_count.reserve(gaps_.front().size());
  for (const GapCount& gap : gaps_.front()) {
    result_.gap_ns.push_back(gap.gap_ns);
    result_.gap_count.push_back(gap.count);
  }
  return std::move(result_);
}

// Lists of gaps that get shorter by more than half: what many workers saw is counted once, as they end.
void Fleet::add_gaps(Gaps gaps) {
  gaps_.push_back(std::move(gaps));
  while (gaps_.size() > 1 && gaps_[gaps_.size() - 2].size() <= 2 * gaps_.back().size()) merge_last_gaps();
}

void Fleet::merge_last_gaps() {
  Gaps merged = merge_gaps(gaps_[gaps_.size() - 2], gaps_.back());
  gaps_.pop_back();
  gaps_.back() = std::move(merged);
}

}  // namespace understudy
