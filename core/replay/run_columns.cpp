#include "replay/run_columns.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "tiers/shared_tier.hpp"

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

void RunColumns::add_engine(std::size_t worker, Engine& engine, bool is_lost) {
  FleetResult& out = result_;
  for (const EngineSample& sample : engine.samples()) {
    out.samples.push_back(sample);
    out.sample_worker.push_back(static_cast<std::int32_t>(worker));
  }
  const EngineSnapshot end = engine.snapshot();
  for_each_line(kTotals, [&](const auto& total) { out.totals.*total.member += end.totals.*total.member; });
  out.evictions += end.evictions;
  out.stored_blocks += end.stored_blocks;
  engine.take_gaps(gaps_);
  // Of workers that crashed, the report is that of the last engine.
  if (GroupReport groups = engine.group_report(); !groups.samples.empty()) {
    out.groups.resize(std::max(out.groups.size(), worker + 1));
    out.groups[worker] = std::move(groups);
  }
  if (!tiers_) return;
  const TierReport tiers = engine.tier_report();
  for (TierUse use : tiers.own) {
    if (is_lost) use.capacity_blocks = use.resident_blocks = 0;
    add_tier(worker, use);
  }
  out.onboard_ns.insert(out.onboard_ns.end(), tiers.loads_ns.begin(), tiers.loads_ns.end());
  out.tier_totals += tiers.totals;
  const auto owner = static_cast<std::int64_t>(worker);
  for (const LinkUsage& usage : tiers.links) add_link(owner, usage);
  for (const LinkId id : tiers.hub_links) hub_link_worker_[{tiers.hub, id}] = owner;
  if (tiers.run == nullptr) return;
  add_shared(*tiers.run, worker);
  add_links(tiers.run->hub().links());
  std::erase_if(hub_link_worker_, [&](const auto& entry) { return entry.first.first == tiers.hub; });  // ends with it
}

TierSummary& RunColumns::add_tier(std::size_t worker, const TierUse& use) {
  std::vector<TierSummary>& tiers = result_.tiers;
  const Pool& pool = pool_of(worker);
  auto found = std::find_if(tiers.begin(), tiers.end(), [&](const TierSummary& t) {
    return t.tier == use.tier && t.first_worker == pool.first_worker;
  });
  if (found == tiers.end()) {
    found = tiers.insert(tiers.end(), TierSummary{use.tier, pool.name, pool.first_worker, 0, 0, 0, 0, {}, {}});
  }
  found->capacity_blocks += use.capacity_blocks;
  found->resident_blocks += use.resident_blocks;
  found->stored_blocks += use.stored_blocks;
  found->evicted_blocks += use.evicted_blocks;
  return *found;
}

const RunColumns::Pool& RunColumns::pool_of(std::size_t worker) const {
  if (const auto late = late_workers_.find(worker); late != late_workers_.end()) return pools_[late->second];
  return *std::prev(std::ranges::upper_bound(pools_, worker, {}, &Pool::first_worker));
}

void RunColumns::add_shared(TierRun& run, std::size_t first_worker, std::span<EventTable> earlier) {
  for (std::size_t i = 0; i < run.shared().size(); ++i) {
    SharedTier& shared = *run.shared()[i];
    const PoolMetrics m = shared.store().metrics(0);
    TierSummary& summary = add_tier(first_worker, {shared.tier(), shared.config().num_blocks,
                                                   m.active_blocks + m.inactive_blocks, m.registrations, m.evictions});
    summary.residency = shared.residency();
    if (!events_) continue;
    if (!earlier.empty()) summary.events = std::move(earlier[i]);
    TimedEvents rest;
    shared.take_events(rest);
    summary.events.append(rest);
  }
}

void RunColumns::add_links(const Links& links) {
  for (LinkId id = 0; id < links.num_links(); ++id) {
    const auto owner = hub_link_worker_.find({&links, id});
    add_link(owner == hub_link_worker_.end() ? kShared : owner->second, links.usage(id));
  }
}

// How the run advanced its workers must not show: some have links of their own, others share a hub.
void RunColumns::add_link(std::int64_t worker, LinkUsage usage) {
  const auto at = std::ranges::upper_bound(link_worker_, worker) - link_worker_.begin();
  link_worker_.insert(link_worker_.begin() + at, worker);
  result_.links.insert(result_.links.begin() + at, std::move(usage));
}

FleetResult RunColumns::take() {
  gaps_.take(result_.gap_ns, result_.gap_count);
  return std::exchange(result_, {});
}

}  // namespace understudy
