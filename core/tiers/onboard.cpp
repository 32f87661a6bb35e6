// What to bring up for a request: where its blocks are, and whether loading them is worth it.
#include <algorithm>
#include <limits>

#include "tiers/worker_tiers.hpp"

namespace understudy {

// Where `blocks` are on the device and on the host.
void WorkerTiers::locate(std::span<const BlockIdentity> blocks) {
  above_.resize(blocks.size());
  below_.resize(blocks.size());
  coming_.resize(blocks.size());
  references_.resize(blocks.size());
  store_.peek(kG1, blocks, above_.data(), references_.data());
  store_.locate(kG2, blocks, below_.data(), coming_.data());
  lower_from_ = blocks.size();
}

// And from `from` on, on the tiers of the run: those above them lack it, so they will lack most of what follows.
void WorkerTiers::locate_lower(std::span<const BlockIdentity> blocks, std::size_t from) {
  if (from >= lower_from_) return;
  lower_from_ = from;
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    auto& [here, coming] = lower_found_[tier];
    here.resize(blocks.size());
    coming.resize(blocks.size());
    run_.shared()[tier]->store().locate(0, blocks.subspan(from), here.data() + from, coming.data() + from);
  }
}

// Block `at` of those that were located, and there is no way above it that it comes by.
bool WorkerTiers::find(const BlockIdentity& block, std::size_t at, Source& source) const {
  source = {};
  source.slot = above_[at];
  source.tier = Tier::G1;
  if (source.slot != kNoSlot) return true;
  if (const std::uint32_t load = loading_.find(block.lineage); load != InFlight::kNone) {
    source.tier = loads_[load].tiers[loads_[load].place_of(block.lineage)];
    source.where = Source::Where::Loading;
    source.id = load;
    source.ready_ns = loads_[load].eta_ns;
    if (loads_[load].joins == 0) source.transfer = loads_[load].transfer;  // else it waits for those before
    return true;
  }
  const auto lands = [&source](Tier tier, const Arrivals& arrivals, SlotId slot) {
    const Arrival& arrival = arrivals.of(slot);
    source = {tier, Source::Where::Landing, slot, 0, arrival.eta_ns, arrival.transfer};
  };
  source.slot = below_[at];
  source.tier = Tier::G2;
  if (source.slot != kNoSlot) return true;
  if (coming_[at] != kNoSlot) {
    lands(Tier::G2, arrivals_, coming_[at]);
    return true;
  }
  if (at < lower_from_) return false;  // nobody has looked there yet
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    source.slot = lower_found_[tier].here[at];
    source.tier = run_.shared()[tier]->tier();
    if (source.slot != kNoSlot) return true;
  }
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    const SlotId coming = lower_found_[tier].coming[at];
    if (coming == kNoSlot) continue;
    lands(run_.shared()[tier]->tier(), run_.shared()[tier]->arrivals(), coming);
    return true;
  }
  return false;
}

// Fills sources_ up to the first block that is nowhere. Looks few blocks up at first, as most often there is none, and
// then more and more together.
void WorkerTiers::find_sources(std::span<const BlockIdentity> blocks) {
  constexpr std::size_t kMost = 64;
  sources_.clear();
  for (std::size_t size = 1; !blocks.empty(); size = std::min(2 * size, kMost)) {
    const std::span<const BlockIdentity> some = blocks.first(std::min(size, blocks.size()));
    locate(some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      Source source;
      if (!find(some[i], i, source)) {
        locate_lower(some, i);
        if (!find(some[i], i, source)) return;
      }
      sources_.push_back(source);
    }
    blocks = blocks.subspan(some.size());
  }
}

std::vector<TierAnswer> WorkerTiers::lookup(std::span<const BlockIdentity> blocks) {
  find_sources(blocks);
  std::vector<TierAnswer> answers;
  for (const Source& source : sources_) {
    TierAnswer answer{TierAnswer::Kind::Hit, source.tier, 0};
    if (source.where != Source::Where::Resident) {
      answer.kind = source.transfer ? TierAnswer::Kind::Pending : TierAnswer::Kind::Retry;
      if (source.transfer) answer.ready_ns = hub().links().deadline_ns(*source.transfer);
    }
    answers.push_back(answer);
  }
  if (answers.size() < blocks.size()) answers.push_back({});
  return answers;
}

// When the first `count` of sources_ could be on the device, if the transfers under way stay and none joins them.
std::int64_t WorkerTiers::eta(std::int64_t now_ns, std::size_t count) const {
  std::int64_t ready_ns = now_ns;
  std::int64_t joined_ns = now_ns;
  std::vector<std::uint64_t> staged(run_.shared().size(), 0);
  std::uint64_t blocks = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Source& source = sources_[i];
    if (source.where == Source::Where::Loading) {
      joined_ns = std::max(joined_ns, source.ready_ns);
      continue;
    }
    if (source.tier == Tier::G1) continue;
    ++blocks;
    for (std::size_t tier = 0; tier < staged.size(); ++tier) {
      if (run_.shared()[tier]->tier() == source.tier) ++staged[tier];
    }
    if (source.where == Source::Where::Landing) ready_ns = std::max(ready_ns, source.ready_ns);
  }
  if (blocks == 0) return joined_ns;
  std::int64_t stage_ns = 0;
  for (std::size_t tier = 0; tier < staged.size(); ++tier) {
    if (staged[tier] == 0) continue;
    SharedTier& shared = *run_.shared()[tier];
    stage_ns = std::max(stage_ns, estimate_.stage_ns(shared.config(), staged[tier] * config_.bytes_per_block,
                                                     shared.loads_under_way(), copying_lower_[tier]));
  }
  const std::int64_t load_ns = estimate_.load_ns(blocks * config_.bytes_per_block, loading_now_, copying_);
  return std::max(joined_ns, ready_ns + stage_ns + load_ns);
}

// The longest run that arrives sooner than it is computed, cut where the tier changes.
std::size_t WorkerTiers::worthwhile(std::int64_t now_ns, std::size_t count,
                                    const std::function<std::int64_t(std::size_t)>& saved_ns) const {
  while (count > 0 && eta(now_ns, count) - now_ns >= saved_ns(count)) {
    const Tier tier = sources_[count - 1].tier;
    while (count > 0 && sources_[count - 1].tier == tier) --count;
  }
  return count;
}

SharedTier* WorkerTiers::shared_tier(Tier tier) const {
  for (const auto& shared : run_.shared()) {
    if (shared->tier() == tier) return shared.get();
  }
  return nullptr;
}

// The slots of sources_[from, to) on `tier`, to used_.
void WorkerTiers::gather_sources(std::size_t from, std::size_t to, Tier tier) {
  used_.clear();
  for (std::size_t i = from; i < to; ++i) {
    const Source& source = sources_[i];
    if (source.tier == tier && source.where == Source::Where::Resident) used_.push_back(source.slot);
  }
}

void WorkerTiers::pin(std::size_t from, std::size_t to) {
  gather_sources(from, to, Tier::G1);
  store_.reference(kG1, used_);
  gather_sources(from, to, Tier::G2);
  store_.reference(kG2, used_);
  for (const auto& shared : run_.shared()) {
    gather_sources(from, to, shared->tier());
    shared->store().reference(0, used_);
  }
}

void WorkerTiers::unpin(std::size_t from, std::size_t to) {
  gather_sources(from, to, Tier::G1);
  store_.release(kG1, used_, true);
  gather_sources(from, to, Tier::G2);
  store_.release(kG2, used_, true);
  for (const auto& shared : run_.shared()) {
    gather_sources(from, to, shared->tier());
    shared->store().release(0, used_, true);
  }
}

WorkerTiers::Onboard WorkerTiers::onboard(RequestSlot who, std::int64_t now_ns, std::span<const SlotId> prefix,
                                          std::span<const BlockIdentity> blocks,
                                          const std::function<std::int64_t(std::size_t)>& saved_ns) {
  find_sources(blocks);
  std::size_t count = sources_.size();
  if (count > 0 && config_.recompute_fallback) {
    count = worthwhile(now_ns, count, saved_ns);
    if (count == 0) return Onboard::Slow;
  }
  // Blocks of the device at the end need no load.
  while (count > 0 && sources_[count - 1].tier == Tier::G1) --count;
  if (count == 0) return Onboard::Miss;

  const auto is_staged = [](const Source& s) { return s.tier > Tier::G2 && s.where != Source::Where::Loading; };
  const auto is_loaded = [](const Source& s) { return s.tier > Tier::G1 && s.where != Source::Where::Loading; };
  store_.reference(kG1, prefix);
  pin(0, count);
  const auto span_of = [&](std::size_t n) { return std::span<const Source>(sources_).first(n); };
  const auto undo = [&](Onboard outcome) {
    unpin(0, count);
    store_.release(kG1, prefix, true);
    return outcome;
  };
  std::vector<SlotId> to(static_cast<std::size_t>(std::ranges::count_if(span_of(count), is_loaded)));
  std::vector<SlotId> staging(static_cast<std::size_t>(std::ranges::count_if(span_of(count), is_staged)));
  Room room = to.empty() ? Room::Taken : Room::Short;
  bool staged = true;
  try {
    if (!to.empty()) room = take(who, now_ns, to);
    if (room == Room::Taken && !staging.empty()) staged = store_.try_allocate(kG2, staging);
  } catch (...) {  // a policy of the user's
    if (room == Room::Taken) store_.give_back(kG1, to);
    (void)undo(Onboard::Miss);
    throw;
  }
  if (room == Room::Wait) return undo(Onboard::Retry);
  if (room == Room::Short) return undo(Onboard::Miss);
  if (!staged) {
    // The host has no room to stage in: what comes before must do.
    staging.clear();
    auto shorter = static_cast<std::size_t>(std::ranges::find_if(sources_, is_staged) - sources_.begin());
    while (shorter > 0 && sources_[shorter - 1].tier == Tier::G1) --shorter;
    unpin(shorter, count);
    count = shorter;
    const auto needed = static_cast<std::size_t>(std::ranges::count_if(span_of(count), is_loaded));
    store_.give_back(kG1, std::span<const SlotId>(to).subspan(needed));
    to.resize(needed);
    if (count == 0) return undo(Onboard::Miss);
  }

  g1_references_ += prefix.size();
  Park park;
  park.since_ns = now_ns;
  park.origin.first_block = prefix.size();
  for (const Source& source : span_of(count)) park.origin.tiers.push_back(source.tier);
  if (!to.empty()) {
    park.loads.push_back(begin_load(now_ns, blocks, count, to, staging, prefix));
  } else {
    park.pins.assign(prefix.begin(), prefix.end());
    for (const Source& source : span_of(count)) {
      if (source.where == Source::Where::Loading) {
        ++totals_.joined_loads;
        if (std::ranges::find(park.loads, source.id) == park.loads.end()) park.loads.push_back(source.id);
      } else {
        park.pins.push_back(source.slot);
        ++g1_references_;
      }
    }
  }
  const std::uint32_t first_load = park.loads[0];
  park.pending = static_cast<std::uint32_t>(park.loads.size());
  if (who != kNobody) {
    for (const std::uint32_t load : park.loads) loads_[load].waiters.push_back(who);
    ++parked_;
    parks_[who] = std::move(park);
  } else if (to.empty()) {
    store_.release(kG1, park.pins, true);
    g1_references_ -= park.pins.size();
  }
  if (!to.empty()) {
    loads_[first_load].prefetch = who == kNobody;
    next_phase(first_load, now_ns);
    hub().run_until(now_ns);
  }
  return Onboard::Parked;
}

bool WorkerTiers::prefetch(std::int64_t now_ns, std::span<const BlockIdentity> blocks) {
  std::vector<SlotId> prefix(blocks.size());
  std::size_t unreferenced = 0;
  prefix.resize(store_.peek_prefix(kG1, blocks, prefix.data(), &unreferenced));
  const auto worth = [](std::size_t) { return std::numeric_limits<std::int64_t>::max(); };
  return onboard(kNobody, now_ns, prefix, blocks.subspan(prefix.size()), worth) == Onboard::Parked;
}

}  // namespace understudy
