// Finds the blocks of a request on all tiers, and decides whether loading them is worth it.
#include <algorithm>
#include <array>

#include "tiers/worker_tiers.hpp"

namespace understudy {

// Locates `blocks` on the device and on the host.
void WorkerTiers::locate(std::span<const BlockIdentity> blocks) {
  above_.resize(blocks.size());
  below_.resize(blocks.size());
  coming_.resize(blocks.size());
  source_tags_.resize(blocks.size());
  if (loading_.may_be_cold()) {
    for (const BlockIdentity& block : blocks) loading_.warm(block.lineage);
  }
  store_.compute_tags(blocks, source_tags_);
  device_.locate(blocks, source_tags_, above_.data(), coming_.data());
  store_.locate(kG2, blocks, source_tags_, below_.data(), coming_.data());
  for (Lower& lower : lower_) lower.end = 0;
}

// Locates blocks from `from` on in the shared tiers, up to the first miss: the tiers above lack this one, so they will
// lack most of those that follow.
void WorkerTiers::locate_lower(std::span<const BlockIdentity> blocks, std::size_t from) {
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    Lower& lower = lower_[tier];
    if (from < lower.end) continue;
    lower.here.resize(blocks.size());
    lower.coming.resize(blocks.size());
    const BlockStore& store = run_.shared()[tier]->store();
    lower.end = from + store.locate_run(0, blocks.subspan(from), lower.here.data() + from, lower.coming.data() + from);
  }
}

// Finds the source of a located block: the highest tier that has it or will have it.
bool WorkerTiers::find(const BlockIdentity& block, std::size_t at, Source& source) const {
  if (above_[at] != kNoSlot) {
    source = {above_[at], 0, Tier::G1, Source::Where::Resident};
    return true;
  }
  const auto brings = [&](std::uint32_t load) { return loads_[load].brings(block.lineage); };
  if (const std::uint32_t load = loading_.find(block.lineage, brings); load != InFlight::kNone) {
    source = {kNoSlot, load, loads_[load].tiers[loads_[load].place_of(block.lineage)], Source::Where::Loading};
    return true;
  }
  if (below_[at] != kNoSlot) {
    source = {below_[at], 0, Tier::G2, Source::Where::Resident};
    return true;
  }
  if (coming_[at] != kNoSlot) {
    source = {coming_[at], 0, Tier::G2, Source::Where::Landing};
    return true;
  }
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    if (at >= lower_[tier].end) return false;  // not searched yet
  }
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    source = {lower_[tier].here[at], 0, run_.shared()[tier]->tier(), Source::Where::Resident};
    if (source.slot != kNoSlot) return true;
  }
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    source = {lower_[tier].coming[at], 0, run_.shared()[tier]->tier(), Source::Where::Landing};
    if (source.slot != kNoSlot) return true;
  }
  return false;
}

// The arrival of a block that is landing on its tier.
const Arrival& WorkerTiers::arrival_of(const Source& source) const {
  if (source.tier == Tier::G2) return copies_.of(source.slot);
  return shared_tier(source.tier)->arrivals().of(source.slot);
}

// Estimates when the block will be there.
std::int64_t WorkerTiers::eta(const Source& source, const Arrival& arrival) const {
  if (source.tier == Tier::G2) return arrival.since_ns + estimate_.copy_ns(arrival.bytes, arrival.concurrent);
  const SharedTierConfig& tier = shared_tier(source.tier)->config();
  return arrival.since_ns + estimate_.lower_copy_ns(tier, arrival.bytes, arrival.concurrent);
}

// The last transfer of a block, if it is in flight and nothing else delays the block.
std::optional<TransferId> WorkerTiers::transfer_of(const Source& source) const {
  if (source.where == Source::Where::Landing) return arrival_of(source).transfer;
  const Load& load = loads_[source.load];
  return load.joins == 0 ? load.transfer : std::nullopt;  // else it waits for the loads before it
}

bool WorkerTiers::has_below(const BlockIdentity& block, Tier lowest) const {
  const auto brings = [&](std::uint32_t load) { return loads_[load].brings(block.lineage); };
  if (loading_.find(block.lineage, brings) != InFlight::kNone) return true;
  std::array<SlotId, 2> found{};  // there, or coming
  const auto has = [&](const BlockStore& store, std::size_t pool) {
    (void)store.locate_run(pool, {&block, 1}, &found[0], &found[1]);
    return found[0] != kNoSlot || found[1] != kNoSlot;
  };
  return has(store_, kG2) || std::ranges::any_of(run_.shared(), [&](const auto& shared) {
           return shared->tier() <= lowest && has(shared->store(), 0);
         });
}

// Fills sources_ up to the first miss. Searches one block first, as mostly there is none, then larger batches.
void WorkerTiers::find_sources(std::span<const BlockIdentity> blocks) {
  constexpr std::size_t kMost = 16;
  sources_.clear();
  for (std::size_t size = 1; !blocks.empty(); size = std::min(4 * size, kMost)) {
    const std::span<const BlockIdentity> some = blocks.first(std::min(size, blocks.size()));
    locate(some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      Source& source = sources_.emplace_back();  // built in place: copying freshly written fields stalls
      if (find(some[i], i, source)) continue;
      locate_lower(some, i);
      if (find(some[i], i, source)) continue;
      sources_.pop_back();
      return;
    }
    blocks = blocks.subspan(some.size());
  }
}

std::vector<TierAnswer> WorkerTiers::lookup(std::span<const BlockIdentity> blocks) {
  hub().require_sound();
  find_sources(blocks);
  std::vector<TierAnswer> answers;
  for (const Source& source : sources_) {
    TierAnswer answer{TierAnswer::Kind::Hit, source.tier, 0};
    if (source.where != Source::Where::Resident) {
      const std::optional<TransferId> transfer = transfer_of(source);
      answer.kind = transfer ? TierAnswer::Kind::Pending : TierAnswer::Kind::Retry;
      if (transfer) answer.ready_ns = hub().links().deadline_ns(*transfer);
    }
    answers.push_back(answer);
  }
  if (answers.size() < blocks.size()) answers.push_back({});
  return answers;
}

// End of the run of sources from `first` on with the same tier and state.
std::size_t WorkerTiers::end_of_run(std::size_t first, std::size_t end) const {
  const auto [tier, where] = std::pair(sources_[first].tier, sources_[first].where);
  while (++first < end && sources_[first].tier == tier && sources_[first].where == where) {
  }
  return first;
}

// Estimates when the first `count` sources will be on the device, if the transfers in flight continue and none starts.
std::int64_t WorkerTiers::eta(std::int64_t now_ns, std::size_t count) const {
  std::int64_t ready_ns = now_ns;
  std::int64_t joined_ns = now_ns;
  std::array<std::uint64_t, 5> from{};  // blocks by tier
  const Arrival* last = nullptr;        // the next block mostly lands with it
  for (std::size_t i = 0; i < count;) {
    const Source& source = sources_[i];
    if (source.where == Source::Where::Loading) {
      joined_ns = std::max(joined_ns, loads_[source.load].eta_ns);
      ++i;
      continue;
    }
    const std::size_t end = end_of_run(i, count);
    from[static_cast<std::size_t>(source.tier)] += end - i;
    for (; source.where == Source::Where::Landing && i < end; ++i) {
      const Arrival& arrival = arrival_of(sources_[i]);
      if (&arrival == last) continue;
      last = &arrival;
      ready_ns = std::max(ready_ns, eta(source, arrival));
    }
    i = end;
  }
  const std::uint64_t blocks = from[2] + from[3] + from[4];
  if (blocks == 0) return joined_ns;
  std::int64_t stage_ns = 0;
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    SharedTier& shared = *run_.shared()[tier];
    const std::uint64_t staged = from[static_cast<std::size_t>(shared.tier())];
    if (staged == 0) continue;
    stage_ns = std::max(stage_ns, estimate_.stage_ns(shared.config(), staged * config_.bytes_per_block,
                                                     shared.loads_under_way(), copying_lower_[tier]));
  }
  const std::int64_t load_ns = estimate_.load_ns(blocks * config_.bytes_per_block, loading_now_, copying_);
  return std::max(joined_ns, ready_ns + stage_ns + load_ns);
}

// Returns the longest run that arrives sooner than it is computed, cut where the tier changes.
std::size_t WorkerTiers::worthwhile(std::int64_t now_ns, std::size_t count,
                                    const std::function<std::int64_t(std::size_t)>& saved_ns) const {
  while (count > 0 && eta(now_ns, count) - now_ns >= saved_ns(count)) {
    const Tier tier = sources_[count - 1].tier;
    while (count > 0 && sources_[count - 1].tier == tier) --count;
  }
  return count;
}

}  // namespace understudy
