#include "router/kv_view.hpp"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "router/group_match.hpp"

namespace understudy {

namespace {

Decay::Limits sent_limits(const KvRouterConfig& config) {
  if (config.use_events) return {config.predict_ttl_ns, 0};
  if (config.approximate_blocks > 0) return {0, config.approximate_blocks};
  return {config.approximate_ttl_ns, 0};
}

std::uint64_t mixed(std::uint64_t z) noexcept {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Uniform number in [0, 1) of a delivery, from publisher and time only: independent of the order of calls.
double chance(std::uint64_t seed, std::uint64_t publisher, std::int64_t time_ns) noexcept {
  const std::uint64_t z = mixed(mixed(mixed(seed) ^ publisher) ^ static_cast<std::uint64_t>(time_ns));
  return static_cast<double>(z >> 11) * 0x1p-53;
}

}  // namespace

KvView::KvView(const KvRouterConfig& config) : config_(config) {
  if (!config.use_events || config.predict_ttl_ns > 0) predicted_ = std::make_unique<PrefixIndex>(sent_limits(config));
  const bool exact = config.use_events && config.predict_ttl_ns == 0 && config.punctual() && config.index_all_groups;
  if (!exact && config.keep_decisions) truth_ = std::make_unique<PrefixIndex>();
}

void KvView::add_worker(std::uint32_t pool, std::shared_ptr<const GroupLayout> groups) {
  const std::uint64_t worker = late_.size();
  if (groups) {
    groups_.resize(worker + 1);
    groups_[worker] = std::move(groups);
  }
  for (PrefixIndex* const index : {&index_, predicted_.get(), truth_.get(), assumed_.get()}) {
    if (index != nullptr) index->join({worker, 0});
  }
  late_.emplace_back();
  degraded_.push_back(false);
  pool_of_.push_back(pool);
}

void KvView::set_degraded(std::size_t worker, bool degraded) {
  if (degraded_.at(worker) == degraded) return;
  degraded_[worker] = degraded;
  if (!assumed_) {
    assumed_ = std::make_unique<PrefixIndex>(Decay::Limits{config_.approximate_ttl_ns, 0});
    for (std::size_t other = 0; other < degraded_.size(); ++other) assumed_->join({other, 0});
  }
  if (!degraded) assumed_->clear(static_cast<PrefixIndex::Member>(worker), std::nullopt);
}

void KvView::apply(PrefixIndex& index, std::size_t worker, std::span<const EventRecord> rows) {
  Applied applied;
  EventRecords first;
  if (!groups_.empty() && !config_.index_all_groups && &index == &index_) {
    const std::size_t group = worker < groups_.size() && groups_[worker] ? groups_[worker]->first_cached() : 0;
    std::ranges::copy_if(rows, std::back_inserter(first), [&](const EventRecord& row) { return row.group == group; });
    rows = first;
  }
  index.apply(static_cast<PrefixIndex::Member>(worker), rows, true, 0, applied);
  if (&index == &index_) unknown_removals_ += applied.unknown.size();
}

void KvView::observe(std::size_t worker, const TimedEvents& events) {
  const EventRecords& rows = events.batch.records;
  if (truth_) apply(*truth_, worker, rows);
  if (!config_.use_events) return;
  if (config_.punctual()) {
    apply(index_, worker, rows);
    return;
  }
  observe_late(late_[worker], worker, events);
}

void KvView::observe_shared(std::uint32_t pool, const TimedEvents& events) {
  if (!config_.use_events || events.batch.records.empty()) return;
  if (shared_.size() <= pool) shared_.resize(pool + std::size_t{1});
  Shared& shared = shared_[pool];
  if (!shared.index) {
    shared.index = std::make_unique<PrefixIndex>();
    shared.index->join({0, 0});
  }
  if (config_.punctual()) {
    apply(*shared.index, 0, events.batch.records);
  } else {
    constexpr std::uint64_t kTierCodes = 8;
    const std::uint64_t publisher = static_cast<std::uint64_t>(events.batch.records.front().tier) + kTierCodes * pool;
    observe_late(shared.late, ~publisher, events);
  }
}

void KvView::observe_late(std::deque<Late>& late, std::uint64_t publisher, const TimedEvents& events) {
  const EventRecords& rows = events.batch.records;
  for (std::size_t first = 0, last = 0; first < rows.size(); first = last) {
    const std::int64_t time_ns = events.time_ns[first];
    while (last < rows.size() && events.time_ns[last] == time_ns) ++last;
    if (config_.event_loss > 0 && chance(config_.seed, publisher, time_ns) < config_.event_loss) {
      ++lost_;
      continue;
    }
    std::int64_t due_ns = time_ns + config_.event_delay_ns;
    if (config_.event_period_ns > 0) {
      due_ns = (due_ns + config_.event_period_ns - 1) / config_.event_period_ns * config_.event_period_ns;
    }
    const auto begin = rows.begin();
    UNDERSTUDY_ASSERT(late.empty() || late.back().due_ns <= due_ns, "deliveries of a publisher are out of order");
    late.push_back({due_ns, {begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(last)}});
  }
}

void KvView::apply_due_events(std::int64_t now_ns) {
  for (std::size_t worker = 0; worker < late_.size(); ++worker) {
    std::deque<Late>& late = late_[worker];
    for (; !late.empty() && late.front().due_ns <= now_ns; late.pop_front()) apply(index_, worker, late.front().rows);
  }
  for (Shared& shared : shared_) {
    std::deque<Late>& late = shared.late;
    for (; !late.empty() && late.front().due_ns <= now_ns; late.pop_front()) apply(*shared.index, 0, late.front().rows);
  }
}

void KvView::sent(std::size_t worker, std::span<const std::uint64_t> prompt, std::int64_t now_ns) {
  Applied applied;
  const auto member = static_cast<PrefixIndex::Member>(worker);
  if (predicted_) predicted_->store(member, Tier::G1, prompt, now_ns, applied);
  if (degraded_[worker]) assumed_->store(member, Tier::G1, prompt, now_ns, applied);
}

void KvView::forget(std::size_t worker) {
  const auto member = static_cast<PrefixIndex::Member>(worker);
  index_.clear(member, std::nullopt);
  if (predicted_) predicted_->clear(member, std::nullopt);
  if (truth_) truth_->clear(member, std::nullopt);
  if (assumed_) assumed_->clear(member, std::nullopt);
  late_[worker].clear();
}

void KvView::check(std::size_t worker, const Residency& store) {
  if (!config_.use_events || !config_.punctual() || !config_.index_all_groups) return;
  const auto member = static_cast<PrefixIndex::Member>(worker);
  const auto violated = [worker](const char* what) {
    throw Error(ErrorKind::InvariantViolated, "the router's index of worker ", worker, what);
  };
  std::uint64_t known = 0;
  for (const Tier tier : {Tier::G1, Tier::G2, Tier::G3, Tier::G4}) known += index_.blocks(member, tier);
  if (known != store.num_hashes()) violated(" has a different number of blocks than the worker");
  if (checks_++ % kWholeEvery != 0) return;
  for (std::size_t pool = 0; pool < store.num_pools(); ++pool) {
    for (const BlockIdentity& block : store.resident(pool)) {
      if (!index_.holds(member, store.tier(pool), block.sequence_hash())) violated(" lacks a block of the worker");
    }
  }
  index_.check();
}

void KvView::match(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out) {
  apply_due_events(now_ns);
  match_index(index_, prompt, config_.index_all_groups, out);
  add_assumed(prompt, now_ns, out);
}

void KvView::match_index(const PrefixIndex& index, std::span<const std::uint64_t> prompt, bool all_groups,
                         std::vector<std::uint32_t>& out) const {
  index.match(prompt, false, out);
  if (groups_.empty()) return;
  GroupMatch groups(index, prompt);
  for (std::size_t worker = 0; worker < groups_.size(); ++worker) {
    if (!groups_[worker]) continue;
    const std::uint32_t pool = pool_of_[worker];
    const PrefixIndex* const shared = pool < shared_.size() ? shared_[pool].index.get() : nullptr;
    const GroupMatch::Units found =
        groups.find(*groups_[worker], static_cast<PrefixIndex::Member>(worker), shared, all_groups);
    std::ranges::copy(found, out.begin() + static_cast<std::ptrdiff_t>(worker * PrefixIndex::kTiers));
  }
}

void KvView::add_assumed(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out) {
  if (predicted_) take_larger(*predicted_, prompt, now_ns, out);
  if (assumed_) take_larger(*assumed_, prompt, now_ns, out);
  for (std::uint32_t pool = 0; pool < shared_.size(); ++pool) add_shared(pool, prompt, out);
}

// Extends what a worker of one group holds with the following blocks on the shared tiers of its pool.
void KvView::add_shared(std::uint32_t pool, std::span<const std::uint64_t> prompt,
                        std::vector<std::uint32_t>& out) const {
  constexpr std::size_t kColumns = PrefixIndex::kTiers;
  const PrefixIndex* const shared = shared_[pool].index.get();
  if (shared == nullptr) return;
  std::vector<std::array<std::uint32_t, kColumns>> ahead(prompt.size() +
                                                         1);  // run of blocks from each block on, by tier
  for (std::size_t i = prompt.size(); i-- > 0;) {
    for (const Tier tier : {Tier::G3, Tier::G4}) {
      if (!shared->holds(0, tier, prompt[i])) continue;
      ahead[i] = ahead[i + 1];
      ++ahead[i][static_cast<std::size_t>(tier) - static_cast<std::size_t>(Tier::G1)];
      break;
    }
  }
  for (std::size_t row = 0; row < out.size(); row += kColumns) {
    const std::size_t worker = row / kColumns;
    if (pool_of_[worker] != pool || (worker < groups_.size() && groups_[worker])) continue;
    std::size_t own = 0;
    for (std::size_t tier = 0; tier < kColumns; ++tier) own += out[row + tier];
    own = std::min(own, prompt.size());  // sent prompts and events of slower tiers may overlap
    for (std::size_t tier = 0; tier < kColumns; ++tier) out[row + tier] += ahead[own][tier];
  }
}

// Uses the larger overlap: a prompt that was just sent will be on the device.
void KvView::take_larger(PrefixIndex& other, std::span<const std::uint64_t> prompt, std::int64_t now_ns,
                         std::vector<std::uint32_t>& out) {
  other.expire(now_ns);
  other.match(prompt, false, scratch_);
  for (std::size_t row = 0; row < out.size(); row += PrefixIndex::kTiers) {
    out[row] = std::max(out[row], scratch_[row]);
  }
}

bool KvView::match_truth(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const {
  if (truth_) match_index(*truth_, prompt, true, out);
  for (std::uint32_t pool = 0; truth_ && pool < shared_.size(); ++pool) add_shared(pool, prompt, out);
  return truth_ != nullptr;
}

}  // namespace understudy
