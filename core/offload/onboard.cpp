// From the host, and the tiers below it, back to the device.
#include <algorithm>
#include <limits>
#include <memory>

#include "offload/worker_tiers.hpp"
#include "xxh3.hpp"

namespace understudy {

// ── Plan ──

bool WorkerTiers::find(const BlockIdentity& block, Source& source) const {
  SlotId above = kNoSlot;
  SlotId below = kNoSlot;
  std::uint32_t references = 0;
  store_.peek(kG1, {&block, 1}, &above, &references);
  if (above == kNoSlot) store_.peek(kG2, {&block, 1}, &below, &references);
  return find(block, above, below, source);
}

// `above` and `below`: where it is on the device and on the host.
bool WorkerTiers::find(const BlockIdentity& block, SlotId above, SlotId below, Source& source) const {
  const std::span<const BlockIdentity> one(&block, 1);
  std::uint32_t references = 0;
  source = {};
  source.slot = above;
  source.tier = Tier::G1;
  if (source.slot != kNoSlot) return true;
  if (const std::uint32_t load = loading_.find(block.lineage); load != InFlight::kNone) {
    const std::vector<BlockIdentity>& blocks = loads_[load].blocks;
    const auto at = std::find(blocks.begin(), blocks.end(), block);
    source.tier = loads_[load].tiers[static_cast<std::size_t>(at - blocks.begin())];
    source.where = Source::Where::Loading;
    source.id = load;
    source.ready_ns = loads_[load].eta_ns;
    source.transfer = loads_[load].transfer;
    return true;
  }
  source.slot = below;
  source.tier = Tier::G2;
  if (source.slot != kNoSlot) return true;
  if (const std::uint32_t copy = landing_.find(block.lineage); copy != InFlight::kNone) {
    source.where = Source::Where::Landing;
    source.id = copy;
    source.ready_ns = copies_[copy].eta_ns;
    source.transfer = copies_[copy].transfer;
    return true;
  }
  for (const auto& shared : run_.shared()) {
    shared->store().peek(0, one, &source.slot, &references);
    source.tier = shared->tier();
    if (source.slot != kNoSlot) return true;
  }
  for (const auto& shared : run_.shared()) {
    if (!shared->coming(block.lineage)) continue;
    source.tier = shared->tier();
    source.where = Source::Where::Landing;
    source.ready_ns = shared->eta_ns(block.lineage);
    source.transfer = shared->transfer(block.lineage);
    return true;
  }
  return false;
}

// Fills sources_ up to the first block that is nowhere. Looks few blocks up at first, as most often there is none, and
// then more and more together.
void WorkerTiers::find_sources(std::span<const BlockIdentity> blocks) {
  constexpr std::size_t kMost = 64;
  sources_.clear();
  above_.resize(kMost);
  below_.resize(kMost);
  references_.resize(kMost);
  for (std::size_t size = 1; !blocks.empty(); size = std::min(2 * size, kMost)) {
    const std::span<const BlockIdentity> some = blocks.first(std::min(size, blocks.size()));
    store_.peek(kG1, some, above_.data(), references_.data());
    store_.peek(kG2, some, below_.data(), references_.data());
    for (std::size_t i = 0; i < some.size(); ++i) {
      Source source;
      if (!find(some[i], above_[i], below_[i], source)) return;
      sources_.push_back(source);
    }
    blocks = blocks.subspan(some.size());
  }
}

std::vector<TierAnswer> WorkerTiers::lookup(std::span<const BlockIdentity> blocks) const {
  std::vector<TierAnswer> answers;
  for (const BlockIdentity& block : blocks) {
    Source source;
    if (!find(block, source)) {
      answers.push_back({});
      break;
    }
    TierAnswer answer{TierAnswer::Kind::Hit, source.tier, 0};
    if (source.where != Source::Where::Resident) {
      answer.kind = TierAnswer::Kind::Pending;
      answer.ready_ns = source.transfer ? hub().links().deadline_ns(*source.transfer)
                                        : std::max(source.ready_ns, hub().links().now_ns());
    }
    answers.push_back(answer);
  }
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
    const std::uint64_t bytes = staged[tier] * config_.bytes_per_block;
    const WayConfig& worker = shared.config().worker;
    const WayConfig& backend = shared.config().backend;
    const std::uint64_t copies = config_.demand_first ? 0 : copying_lower_[tier];
    const std::int64_t flow_ns = std::max(worker.flow_ns(worker.up, bytes, 1, copies),
                                          backend.flow_ns(backend.up, bytes, 1 + shared.loads_under_way(), copies));
    stage_ns = std::max(stage_ns, worker.up.fixed_ns + backend.up.fixed_ns + flow_ns);
  }
  const std::int64_t load_ns =
      config_.host.up.fixed_ns + config_.host.flow_ns(config_.host.up, blocks * config_.bytes_per_block,
                                                      1 + loading_now_, config_.demand_first ? 0 : copying_);
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

void WorkerTiers::pin(std::size_t from, std::size_t to) {
  for (std::size_t i = from; i < to; ++i) {
    const Source& source = sources_[i];
    if (source.where != Source::Where::Resident) continue;
    const std::span<const SlotId> one(&source.slot, 1);
    if (source.tier <= Tier::G2) {
      store_.reference(source.tier == Tier::G1 ? kG1 : kG2, one);
    } else {
      shared_tier(source.tier)->store().reference(0, one);
    }
  }
}

void WorkerTiers::unpin(std::size_t from, std::size_t to) {
  for (std::size_t i = to; i-- > from;) {
    const Source& source = sources_[i];
    if (source.where != Source::Where::Resident) continue;
    const std::span<const SlotId> one(&source.slot, 1);
    if (source.tier <= Tier::G2) {
      store_.release(source.tier == Tier::G1 ? kG1 : kG2, one);
    } else {
      shared_tier(source.tier)->store().release(0, one);
    }
  }
}

WorkerTiers::Onboard WorkerTiers::onboard(RequestId who, std::int64_t now_ns, std::span<const SlotId> prefix,
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

// ── Load ──

std::uint32_t WorkerTiers::begin_load(std::int64_t now_ns, std::span<const BlockIdentity> blocks, std::size_t count,
                                      std::span<const SlotId> to, std::span<const SlotId> staging,
                                      std::span<const SlotId> prefix) {
  if (free_loads_.empty()) {
    free_loads_.push_back(static_cast<std::uint32_t>(loads_.size()));
    loads_.emplace_back();
  }
  const std::uint32_t index = free_loads_.back();
  free_loads_.pop_back();
  const std::int64_t eta_ns = eta(now_ns, count);
  Load& load = loads_[index];
  load.alive = true;
  load.start_ns = now_ns;
  load.eta_ns = eta_ns;
  load.to.assign(to.begin(), to.end());
  load.pins.assign(prefix.begin(), prefix.end());
  std::size_t next_staging = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Source& source = sources_[i];
    if (source.where == Source::Where::Loading) {
      ++totals_.joined_loads;
      load.joined.push_back(blocks[i]);
      std::vector<std::uint32_t>& followers = loads_[source.id].followers;
      if (std::ranges::find(followers, index) == followers.end()) {
        followers.push_back(index);
        ++load.joins;
      }
      continue;
    }
    if (source.tier == Tier::G1) {
      load.pins.push_back(source.slot);
      ++g1_references_;
      continue;
    }
    const auto at = static_cast<std::uint32_t>(load.blocks.size());
    const bool below = source.tier > Tier::G2;
    const bool landing = source.where == Source::Where::Landing;
    load.blocks.push_back(blocks[i]);
    load.tiers.push_back(source.tier);
    load.from.push_back(below ? staging[next_staging++] : landing ? kNoSlot : source.slot);
    load.shared.push_back(below && !landing ? source.slot : kNoSlot);
    loading_.insert(blocks[i].lineage, index);
    if (!landing) continue;
    ++load.pending;
    if (!below) {
      copies_[source.id].loads.push_back({index, at});
      continue;
    }
    shared_tier(source.tier)->wait_for(blocks[i].lineage, *this, index, at);
  }
  g1_references_ += to.size();
  ++totals_.onboards;
  totals_.onboarded_blocks += to.size();
  ++load.pending;  // the caller's, who starts it
  return index;
}

// A block that a load waits for is on its tier, referenced by whoever brought it.
void WorkerTiers::source_landed(std::uint32_t index, std::uint32_t block, SlotId slot, std::int64_t time_ns) {
  Load& load = loads_[index];
  const std::span<const SlotId> one(&slot, 1);
  if (load.tiers[block] == Tier::G2) {
    store_.reference(kG2, one);
    load.from[block] = slot;
  } else {
    shared_tier(load.tiers[block])->store().reference(0, one);
    load.shared[block] = slot;
  }
  next_phase(index, time_ns);
}

// One thing less to wait for.
void WorkerTiers::next_phase(std::uint32_t index, std::int64_t time_ns) {
  if (--loads_[index].pending > 0) return;
  switch (loads_[index].phase) {
    case Phase::Landing:
      stage(index, time_ns);
      break;
    case Phase::Staging:
      staged(index, time_ns);
      break;
    case Phase::Loading:
      finish(index, time_ns);
      break;
  }
}

void WorkerTiers::stage(std::uint32_t index, std::int64_t time_ns) {
  if (unwanted(index)) return drop(index, time_ns);
  Load& load = loads_[index];
  load.phase = Phase::Staging;
  ++load.pending;  // until all have been started
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    SharedTier& shared = *run_.shared()[tier];
    const auto blocks = static_cast<std::uint64_t>(std::ranges::count(loads_[index].tiers, shared.tier()));
    if (blocks == 0) continue;
    ++loads_[index].pending;
    ++shared.loads_under_way();
    const std::array<LinkId, 2> path{ways_[tier].up, shared.backend().up};
    hub().start(time_ns, path, blocks * config_.bytes_per_block, Priority::Demand, *this,
                {kStage, index, static_cast<std::uint32_t>(tier)});
  }
  next_phase(index, time_ns);
}

// What came from below is on the host now.
void WorkerTiers::staged(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  for (const auto& shared : run_.shared()) {
    std::vector<SlotId> slots;
    std::vector<SlotId> sources;
    std::vector<BlockIdentity> blocks;
    for (std::size_t i = 0; i < load.blocks.size(); ++i) {
      if (load.tiers[i] != shared->tier()) continue;
      slots.push_back(load.from[i]);
      sources.push_back(load.shared[i]);
      blocks.push_back(load.blocks[i]);
    }
    if (slots.empty()) continue;
    store_.commit(kG2, slots, blocks);
    for (std::size_t i = 0, next = 0; i < load.blocks.size(); ++i) {
      if (load.tiers[i] == shared->tier()) load.from[i] = slots[next++];
    }
    shared->store().release(0, sources, true);
  }
  load.phase = Phase::Loading;
  bring_up(index, time_ns);
}

void WorkerTiers::bring_up(std::uint32_t index, std::int64_t time_ns) {
  if (unwanted(index)) return drop(index, time_ns);
  Load& load = loads_[index];
  load.pending = load.joins + (load.failed ? 0 : 1) + 1;  // and this call
  if (!load.failed) {
    ++loading_now_;
    ++loads_begun_;
    loads_[index].transfer = hub().start(time_ns, std::span(&host_.up, 1), load.blocks.size() * config_.bytes_per_block,
                                         Priority::Demand, *this, {kLoad, index});
  }
  next_phase(index, time_ns);
}

// Everybody who waited has left, and the next part of the way has not begun.
bool WorkerTiers::unwanted(std::uint32_t index) const {
  const Load& load = loads_[index];
  return !load.prefetch && load.waiters.empty() && load.followers.empty();
}

void WorkerTiers::drop(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  for (std::size_t i = 0; i < load.blocks.size(); ++i) {
    const std::span<const SlotId> one(&load.from[i], 1);
    if (load.tiers[i] == Tier::G2 || load.phase == Phase::Loading) {
      store_.release(kG2, one);
    } else {
      store_.give_back(kG2, one);
      shared_tier(load.tiers[i])->store().release(0, std::span<const SlotId>(&load.shared[i], 1));
    }
  }
  give_back(load.to);
  if (load.joins > 0) {
    for (Load& other : loads_) std::erase(other.followers, index);
  }
  end_load(index, time_ns);
}

bool WorkerTiers::fails(std::uint32_t index) const {
  if (config_.onboard_failure_rate <= 0) return false;
  const Load& load = loads_[index];
  const std::uint64_t dice = xxh3_64_pair(load.blocks[0].sequence_hash(), loads_begun_, config_.seed);
  return static_cast<double>(dice >> 11) * 0x1p-53 < config_.onboard_failure_rate;
}

// The blocks are on the device, cached; those that somebody computed meanwhile are there twice, and one goes.
void WorkerTiers::finish(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  if (!load.failed) {
    const auto here = std::make_unique<bool[]>(load.blocks.size());
    store_.has_blocks(kG1, load.blocks, here.get());
    std::vector<SlotId> spare;
    std::vector<SlotId> slots;
    std::vector<BlockIdentity> blocks;
    for (std::size_t i = 0; i < load.blocks.size(); ++i) {
      (here[i] ? spare : slots).push_back(load.to[i]);
      if (!here[i]) blocks.push_back(load.blocks[i]);
    }
    give_back(spare);
    store_.commit(kG1, slots, blocks);
    store_.release(kG1, slots, true);
    g1_references_ -= slots.size();
    released_ += slots.size();
    onboard_ns_.push_back(time_ns - load.start_ns);
  } else {
    give_back(load.to);
    ++totals_.failed_loads;
  }
  if (config_.exclusive && !load.failed) store_.set_reset_on_release(kG2, load.from, true);
  store_.release(kG2, load.from, true);
  end_load(index, time_ns);
}

void WorkerTiers::end_load(std::uint32_t index, std::int64_t time_ns) {
  const Load load = std::move(loads_[index]);
  loads_[index] = {};
  free_loads_.push_back(index);
  for (const BlockIdentity& block : load.blocks) loading_.erase(block.lineage);
  store_.release(kG1, load.pins, true);
  g1_references_ -= load.pins.size();
  released_ += load.pins.size();
  for (const RequestId who : load.waiters) unpark(who, load.failed, time_ns);
  for (const std::uint32_t follower : load.followers) {
    // Without its parents a block has no place on the device: they stay until it is there.
    if (load.failed) loads_[follower].failed = true;
    if (!load.failed) hold_parents(loads_[follower], load);
    --loads_[follower].joins;
    if (loads_[follower].phase == Phase::Loading) next_phase(follower, time_ns);
  }
}

// What `load` has brought for `follower` is referenced on its behalf.
void WorkerTiers::hold_parents(Load& follower, const Load& load) {
  for (const BlockIdentity& block : follower.joined) {
    if (std::ranges::find(load.blocks, block) == load.blocks.end()) continue;
    SlotId slot = kNoSlot;
    std::uint32_t references = 0;
    store_.peek(kG1, {&block, 1}, &slot, &references);
    store_.reference(kG1, {&slot, 1});
    follower.pins.push_back(slot);
    ++g1_references_;
  }
}

// ── Requests ──

void WorkerTiers::unpark(RequestId who, bool failed, std::int64_t time_ns) {
  Park& park = parks_.at(who);
  park.origin.failed = park.origin.failed || failed;
  if (--park.pending > 0) return;
  park.origin.parked_ns = time_ns - park.since_ns;
  park.done = true;
  --parked_;
  store_.release(kG1, park.pins, true);
  g1_references_ -= park.pins.size();
  released_ += park.pins.size();
  park.pins.clear();
  ready_.push_back(who);
}

void WorkerTiers::abandon(RequestId who) {
  const auto found = parks_.find(who);
  if (found == parks_.end()) return;
  Park& park = found->second;
  if (!park.done) {
    --parked_;
    for (const std::uint32_t load : park.loads) std::erase(loads_[load].waiters, who);
    store_.release(kG1, park.pins, true);
    g1_references_ -= park.pins.size();
    released_ += park.pins.size();
  }
  std::erase(ready_, who);
  parks_.erase(found);
}

std::optional<WorkerTiers::Origin> WorkerTiers::take_origin(RequestId who) {
  const auto found = parks_.find(who);
  if (found == parks_.end()) return std::nullopt;
  Origin origin = std::move(found->second.origin);
  parks_.erase(found);
  return origin;
}

// ── Watch ──

bool WorkerTiers::idle() const noexcept {
  return copying_ == 0 && queued_.empty() && copying_lower_[0] + copying_lower_[1] == 0 && loading_.size() == 0;
}

void WorkerTiers::check() const {
  std::uint64_t held = 0;
  std::uint64_t references = 0;
  std::uint64_t reserved = 0;
  std::size_t landing = 0;
  std::size_t loading = 0;
  for (const Copy& copy : copies_) {
    if (!copy.alive) continue;
    held += copy.evicted ? copy.from.size() : 0;
    references += copy.from.size();
    reserved += copy.to.size();
    landing += copy.blocks.size();
  }
  for (const Load& load : loads_) {
    if (!load.alive) continue;
    references += load.to.size() + load.pins.size();
    loading += load.blocks.size();
    if (load.phase == Phase::Loading) continue;
    reserved += static_cast<std::uint64_t>(std::ranges::count_if(load.tiers, [](Tier t) { return t > Tier::G2; }));
  }
  std::size_t parked = 0;
  for (const auto& [who, park] : parks_) {
    references += park.pins.size();
    parked += park.done ? 0 : 1;
  }
  const PoolMetrics g2 = store_.metrics(kG2);
  if (held != held_ || references != g1_references_ || landing != landing_.size() || loading != loading_.size() ||
      reserved != g2.mutable_blocks || parked != parked_) {
    throw Error(ErrorKind::InvariantViolated, "tiers: held ", held, "/", held_, ", references ", references, "/",
                g1_references_, ", landing ", landing, "/", landing_.size(), ", loading ", loading, "/",
                loading_.size(), ", reserved ", reserved, "/", g2.mutable_blocks, ", parked ", parked, "/", parked_);
  }
}

}  // namespace understudy
