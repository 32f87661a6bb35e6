#include "router/kv_view.hpp"

#include <algorithm>

#include "base/errors.hpp"

namespace understudy {

namespace {

Ageing::Limits sent_limits(const KvRouterConfig& config) {
  if (config.use_events) return {config.predict_ttl_ns, 0};
  if (config.approximate_blocks > 0) return {0, config.approximate_blocks};
  return {config.approximate_ttl_ns, 0};
}

void join_all(PrefixIndex& index, std::size_t workers) {
  for (std::size_t worker = 0; worker < workers; ++worker) index.join({worker, 0});
}

}  // namespace

KvView::KvView(const KvRouterConfig& config, std::size_t workers) : config_(config), random_(config.seed ^ 0x6C6F7373) {
  join_all(index_, workers);
  if (!config.use_events || config.predict_ttl_ns > 0) {
    predicted_ = std::make_unique<PrefixIndex>(sent_limits(config));
    join_all(*predicted_, workers);
  }
  late_.resize(workers);
  const bool exact = config.use_events && config.predict_ttl_ns == 0 && punctual();
  if (!exact && config.keep_decisions) {
    truth_ = std::make_unique<PrefixIndex>();
    join_all(*truth_, workers);
  }
}

void KvView::add_worker() {
  const std::uint64_t worker = late_.size();
  for (PrefixIndex* const index : {&index_, predicted_.get(), truth_.get()}) {
    if (index != nullptr) index->join({worker, 0});
  }
  late_.emplace_back();
}

void KvView::apply(PrefixIndex& index, std::size_t worker, std::span<const EventRecord> rows) {
  Applied applied;
  index.apply(static_cast<PrefixIndex::Member>(worker), rows, true, 0, applied);
  if (&index == &index_) unknown_removals_ += applied.unknown.size();
}

void KvView::observe(std::size_t worker, const TimedEvents& events) {
  const EventRecords& rows = events.batch.records;
  if (truth_) apply(*truth_, worker, rows);
  if (!config_.use_events) return;
  if (punctual()) {
    apply(index_, worker, rows);
    return;
  }
  for (std::size_t first = 0, last = 0; first < rows.size(); first = last) {
    const std::int64_t time_ns = events.time_ns[first];
    while (last < rows.size() && events.time_ns[last] == time_ns) ++last;
    if (config_.event_loss > 0 && std::uniform_real_distribution<double>()(random_) < config_.event_loss) {
      ++lost_;
      continue;
    }
    std::int64_t due_ns = time_ns + config_.event_delay_ns;
    if (config_.event_period_ns > 0) {
      due_ns = (due_ns + config_.event_period_ns - 1) / config_.event_period_ns * config_.event_period_ns;
    }
    const auto begin = rows.begin();
    late_[worker].push_back(
        {due_ns, {begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(last)}});
  }
}

void KvView::catch_up(std::int64_t now_ns) {
  for (std::size_t worker = 0; worker < late_.size(); ++worker) {
    std::deque<Late>& late = late_[worker];
    for (; !late.empty() && late.front().due_ns <= now_ns; late.pop_front()) apply(index_, worker, late.front().rows);
  }
}

void KvView::sent(std::size_t worker, std::span<const std::uint64_t> prompt, std::int64_t now_ns) {
  if (!predicted_) return;
  Applied applied;
  predicted_->store(static_cast<PrefixIndex::Member>(worker), Tier::G1, prompt, now_ns, applied);
}

void KvView::forget(std::size_t worker) {
  const auto member = static_cast<PrefixIndex::Member>(worker);
  index_.clear(member, std::nullopt);
  if (predicted_) predicted_->clear(member, std::nullopt);
  if (truth_) truth_->clear(member, std::nullopt);
  late_[worker].clear();
}

void KvView::check(std::size_t worker, const Residency& store) {
  if (!config_.use_events || !punctual()) return;
  const auto member = static_cast<PrefixIndex::Member>(worker);
  const auto violated = [worker](const char* what) {
    throw Error(ErrorKind::InvariantViolated, "the router's index of worker ", worker, what);
  };
  std::uint64_t known = 0;
  for (const Tier tier : {Tier::G1, Tier::G2, Tier::G3, Tier::G4}) known += index_.blocks(member, tier);
  if (known != store.num_hashes()) violated(" does not hold as many blocks as it does");
  if (checks_++ % kWholeEvery != 0) return;
  for (std::size_t pool = 0; pool < store.num_pools(); ++pool) {
    for (const BlockIdentity& block : store.resident(pool)) {
      if (!index_.holds(member, store.tier(pool), block.sequence_hash())) violated(" lacks a block that it holds");
    }
  }
  index_.check();
}

void KvView::match(std::span<const std::uint64_t> prompt, std::int64_t now_ns, std::vector<std::uint32_t>& out) {
  catch_up(now_ns);
  index_.match(prompt, false, out);
  if (!predicted_) return;
  predicted_->expire(now_ns);
  predicted_->match(prompt, false, scratch_);
  // The larger overlap counts: what was just sent will be on the device.
  for (std::size_t row = 0; row < out.size(); row += PrefixIndex::kTiers) {
    out[row] = std::max(out[row], scratch_[row]);
  }
}

bool KvView::match_truth(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const {
  if (truth_) truth_->match(prompt, false, out);
  return truth_ != nullptr;
}

}  // namespace understudy
