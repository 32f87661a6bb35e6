#include "replay/run_columns.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

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

void RunColumns::prepare(std::size_t rows, bool tiers, bool events) {
  tiers_ = tiers;
  events_ = events;
  const auto prepare = [&](const auto& column) { fill(result_.*column.kept, rows, column.none); };
  for_each_line(kRecordColumns, prepare);
  if (tiers_) for_each_line(kTierRecordColumns, prepare);
}

void RunColumns::add_pool(std::string name, std::size_t first_worker) {
  if (first_worker == 0) pools_.clear();
  pools_.push_back({std::move(name), first_worker});
}

void RunColumns::keep(std::uint64_t row, const RequestRecord& record) {
  const auto write = [&](const auto& column) { set(result_.*column.kept, row, std::invoke(column.of, record)); };
  for_each_line(kRecordColumns, write);
  if (tiers_) for_each_line(kTierRecordColumns, write);
}

void RunColumns::add_engine(std::size_t worker, VllmEngine& engine) {
  FleetResult& out = result_;
  for (const EngineSample& sample : engine.samples()) {
    out.samples.push_back(sample);
    out.sample_worker.push_back(static_cast<std::int32_t>(worker));
  }
  const EngineSnapshot end = engine.snapshot();
  for_each_line(kTotals, [&](const auto& total) { out.totals.*total.member += end.totals.*total.member; });
  out.evictions += end.evictions;
  out.stored_blocks += end.stored_blocks;
  if (tiers_) add_tier(worker, Tier::G1, engine.store().num_blocks(0), engine.store().metrics(0));
  if (engine.tiers() != nullptr) add_tiers(worker, engine);
  engine.take_gaps(gaps_);
}

void RunColumns::add_tiers(std::size_t worker, VllmEngine& engine) {
  const WorkerTiers& tiers = *engine.tiers();
  FleetResult& out = result_;
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
  add_tier(worker, Tier::G2, host_blocks, host);
  out.onboard_ns.insert(out.onboard_ns.end(), tiers.onboard_ns().begin(), tiers.onboard_ns().end());
  out.tier_totals += totals;
  if (engine.own_run() != nullptr) {
    add_shared(*engine.own_run(), worker);
    add_links(engine.own_run()->hub().links());
  }
}

TierSummary& RunColumns::add_tier(std::size_t worker, Tier tier, std::uint64_t capacity_blocks,
                                  const PoolMetrics& metrics) {
  std::vector<TierSummary>& tiers = result_.tiers;
  const Pool& pool = pool_of(worker);
  auto found = std::find_if(tiers.begin(), tiers.end(), [&](const TierSummary& t) {
    return t.tier == tier && t.first_worker == pool.first_worker;
  });
  if (found == tiers.end()) {
    found = tiers.insert(tiers.end(), TierSummary{tier, pool.name, pool.first_worker, 0, 0, 0, 0, {}, {}});
  }
  found->capacity_blocks += capacity_blocks;
  found->resident_blocks += metrics.active_blocks + metrics.inactive_blocks;
  found->stored_blocks += metrics.registrations;
  found->evicted_blocks += metrics.evictions;
  return *found;
}

const RunColumns::Pool& RunColumns::pool_of(std::size_t worker) const {
  return *std::prev(std::ranges::upper_bound(pools_, worker, {}, &Pool::first_worker));
}

void RunColumns::add_shared(TierRun& run, std::size_t first_worker, std::span<EventTable> told) {
  for (std::size_t i = 0; i < run.shared().size(); ++i) {
    SharedTier& shared = *run.shared()[i];
    TierSummary& summary = add_tier(first_worker, shared.tier(), shared.config().num_blocks, shared.store().metrics(0));
    summary.residency = shared.residency();
    if (!events_) continue;
    if (!told.empty()) summary.events = std::move(told[i]);
    TimedEvents rest;
    shared.take_events(rest);
    summary.events.append(rest);
  }
}

void RunColumns::add_links(const Links& links) {
  for (LinkId id = 0; id < links.num_links(); ++id) result_.links.push_back(links.usage(id));
}

FleetResult RunColumns::take() {
  const Gaps gaps = gaps_.take();
  result_.gap_ns.reserve(gaps.size());
  result_.gap_count.reserve(gaps.size());
  for (const GapCount& gap : gaps) {
    result_.gap_ns.push_back(gap.gap_ns);
    result_.gap_count.push_back(gap.count);
  }
  return std::exchange(result_, {});
}

}  // namespace understudy
