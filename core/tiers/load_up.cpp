// Loads from the host, and the tiers below it, back to the device.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "base/assert.hpp"
#include "tiers/worker_tiers.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

namespace {

constexpr std::size_t kLong = 1024;  // blocks; the memory of longer loads is not kept

std::uint32_t position_of(const BlockIdentity& block) { return block.lineage.position(); }

}  // namespace

std::size_t WorkerTiers::Load::place_of(const LineageHash& block) const {
  const auto index = [this](auto at) { return static_cast<std::size_t>(at - blocks.begin()); };
  if (!ascends) return index(std::ranges::find(blocks, block, &BlockIdentity::lineage));
  const auto at = std::ranges::lower_bound(blocks, block.position(), {}, position_of);
  return at != blocks.end() && at->lineage == block ? index(at) : blocks.size();
}

// Keeps its memory, unless that of a long one.
void WorkerTiers::Load::clear() noexcept {
  if (blocks.capacity() > kLong) {
    *this = {};
    return;
  }
  alive = failed = prefetch = ascends = false;
  phase = Phase::Landing;
  pending = joins = 0;
  start_ns = eta_ns = 0;
  transfer.reset();
  blocks.clear();
  to.clear();
  from.clear();
  tiers.clear();
  shared.clear();
  pins.clear();
  waiters.clear();
  followers.clear();
  joined.clear();
}

std::uint32_t WorkerTiers::begin_load(std::int64_t now_ns, std::span<const BlockIdentity> blocks, const Places& places,
                                      std::span<const SlotId> prefix) {
  const std::size_t count = places.count;
  const std::vector<SlotId>& to = places.to;
  const std::vector<SlotId>& staging = places.staging;
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
  load.blocks.resize(to.size());
  load.tiers.resize(to.size());
  load.from.resize(to.size());
  load.shared.resize(to.size());
  std::uint32_t next = 0;
  std::size_t next_staging = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Source& source = sources_[i];
    if (source.where == Source::Where::Loading) {
      ++totals_.joined_loads;
      load.joined.push_back(blocks[i]);
      std::vector<std::uint32_t>& followers = loads_[source.load].followers;
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
    const std::uint32_t at = next++;
    const bool below = source.tier > Tier::G2;
    const bool landing = source.where == Source::Where::Landing;
    load.blocks[at] = blocks[i];
    load.tiers[at] = source.tier;
    load.from[at] = below ? staging[next_staging++] : landing ? kNoSlot : source.slot;
    load.shared[at] = below && !landing ? source.slot : kNoSlot;
    if (!landing) continue;
    ++load.pending;
    if (below) {
      shared_tier(source.tier)->arrivals().wait_for(source.slot, *this, index, at);
    } else {
      copies_.wait_for(source.slot, *this, index, at);
    }
  }
  load.ascends =
      std::ranges::adjacent_find(load.blocks, std::ranges::greater_equal{}, position_of) == load.blocks.end();
  static_assert(std::is_nothrow_move_constructible_v<Load>);  // so its blocks do not move in memory
  loading_.begin(index, load.blocks, load.ascends);
  g1_references_ += to.size();
  ++totals_.onboards;
  totals_.onboarded_blocks += to.size();
  ++load.pending;  // held by the caller, which starts the load
  return index;
}

// A block that a load waits for has landed on its tier, referenced by the transfer that brought it.
void WorkerTiers::source_landed(std::uint32_t index, std::uint32_t block, SlotId slot, std::int64_t time_ns) {
  ++landings_;
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
  changed(time_ns);
}

// Counts down what the phase waits for; at zero starts the next phase.
void WorkerTiers::next_phase(std::uint32_t index, std::int64_t time_ns) {
  UNDERSTUDY_ASSERT(loads_[index].alive && loads_[index].pending > 0, "a load is notified that waits for nothing");
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
  ++load.pending;  // until all have started
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    SharedTier& shared = *run_.shared()[tier];
    const auto blocks = static_cast<std::uint64_t>(std::ranges::count(loads_[index].tiers, shared.tier()));
    if (blocks == 0) continue;
    ++loads_[index].pending;
    ++shared.loads_under_way();
    const std::array<LinkId, 2> path{tier_links_[tier].up, shared.backend().up};
    hub().start(time_ns, path, blocks * config_.bytes_per_block, Priority::Demand, *this,
                {kStage, index, static_cast<std::uint32_t>(tier)});
  }
  next_phase(index, time_ns);
}

// Blocks from lower tiers are on the host now.
void WorkerTiers::staged(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  for (const auto& shared : run_.shared()) {
    // Usually one run of blocks, the last ones or all: hosts evict from the ends of chains.
    const auto from_here = [&](Tier tier) { return tier == shared->tier(); };
    const auto first = std::ranges::find_if(load.tiers, from_here);
    if (first == load.tiers.end()) continue;
    const auto at = static_cast<std::size_t>(first - load.tiers.begin());
    const auto end = std::find_if_not(first, load.tiers.end(), from_here);
    const auto count = static_cast<std::size_t>(end - first);
    if (std::any_of(end, load.tiers.end(), from_here)) {
      commit_scattered(load, *shared);
      continue;
    }
    store_.commit(kG2, std::span(load.from).subspan(at, count), std::span(load.blocks).subspan(at, count));
    shared->store().release(0, std::span(load.shared).subspan(at, count), true);
  }
  load.phase = Phase::Loading;
  start_load(index, time_ns);
}

void WorkerTiers::commit_scattered(Load& load, SharedTier& shared) {
  std::vector<SlotId> slots;
  std::vector<SlotId> sources;
  std::vector<BlockIdentity> blocks;
  for (std::size_t i = 0; i < load.blocks.size(); ++i) {
    if (load.tiers[i] != shared.tier()) continue;
    slots.push_back(load.from[i]);
    sources.push_back(load.shared[i]);
    blocks.push_back(load.blocks[i]);
  }
  store_.commit(kG2, slots, blocks);
  for (std::size_t i = 0, next = 0; i < load.blocks.size(); ++i) {
    if (load.tiers[i] == shared.tier()) load.from[i] = slots[next++];
  }
  shared.store().release(0, sources, true);
}

void WorkerTiers::start_load(std::uint32_t index, std::int64_t time_ns) {
  if (unwanted(index)) return drop(index, time_ns);
  Load& load = loads_[index];
  load.pending = load.joins + (load.failed ? 0 : 1) + 1;  // plus one for this call
  if (!load.failed) {
    ++loading_now_;
    ++loads_begun_;
    loads_[index].transfer = hub().start(time_ns, std::span(&host_.up, 1), load.blocks.size() * config_.bytes_per_block,
                                         Priority::Demand, *this, {kLoad, index});
  } else {
    totals_.onboarded_blocks -= load.blocks.size();  // one that it joined failed: it moves nothing
  }
  next_phase(index, time_ns);
}

// True if no request waits any more and the next transfer has not started.
bool WorkerTiers::unwanted(std::uint32_t index) const {
  const Load& load = loads_[index];
  return !load.prefetch && load.waiters.empty() && load.followers.empty();
}

void WorkerTiers::drop(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  totals_.onboarded_blocks -= load.blocks.size();  // none moves to the device
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
  if (config_.onboard_failure_rate <= 0 && load_failure_rate_ <= 0) return false;
  const Load& load = loads_[index];
  double rate = config_.onboard_failure_rate;
  if (std::ranges::find(load.tiers, failing_tier_) != load.tiers.end()) rate = std::max(rate, load_failure_rate_);
  const std::uint64_t drawn = xxh3_64_pair(load.blocks[0].sequence_hash(), loads_begun_, config_.seed);
  return static_cast<double>(drawn >> 11) * 0x1p-53 < rate;
}

// Registers the blocks on the device as cached; frees the slots of those that were computed meanwhile.
void WorkerTiers::finish(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  if (!load.failed) {
    const auto here = std::make_unique<bool[]>(load.blocks.size());
    device_.has_blocks(load.blocks, here.get());
    const std::span<const bool> twice(here.get(), load.blocks.size());
    if (std::ranges::find(twice, true) == twice.end()) {
      device_.commit(load.to, load.blocks);
      release_g1(load.to);
    } else {
      std::vector<SlotId> spare;
      std::vector<SlotId> slots;
      std::vector<BlockIdentity> blocks;
      for (std::size_t i = 0; i < load.blocks.size(); ++i) {
        (here[i] ? spare : slots).push_back(load.to[i]);
        if (!here[i]) blocks.push_back(load.blocks[i]);
      }
      give_back(spare);
      device_.commit(slots, blocks);
      release_g1(slots);
    }
  } else {
    give_back(load.to);
    ++totals_.failed_loads;
  }
  if (keeps_load_times_) onboard_ns_.push_back(time_ns - load.start_ns);
  if (config_.exclusive && !load.failed) store_.set_reset_on_release(kG2, load.from, true);
  store_.release(kG2, load.from, true);
  end_load(index, time_ns);
}

// No load may begin in here: the entry is reused once all waiters were notified.
void WorkerTiers::end_load(std::uint32_t index, std::int64_t time_ns) {
  Load& load = loads_[index];
  UNDERSTUDY_ASSERT(load.alive, "a load ends twice");
  free_loads_.push_back(index);
  ++loads_ended_;
  loading_.end(index, load.blocks);
  release_g1(load.pins);
  for (const RequestSlot request : load.waiters) unpark(request, load.failed, time_ns);
  for (const std::uint32_t follower : load.followers) {
    // A block needs its parents on the device: they are referenced until it is there.
    if (load.failed) loads_[follower].failed = true;
    if (!load.failed) hold_parents(loads_[follower], load);
    UNDERSTUDY_ASSERT(loads_[follower].joins > 0, "a load waits for fewer loads than none");
    --loads_[follower].joins;
    if (loads_[follower].phase == Phase::Loading) next_phase(follower, time_ns);
  }
  load.clear();
}

// References the blocks that `load` has brought for `follower`.
void WorkerTiers::hold_parents(Load& follower, const Load& load) {
  for (const BlockIdentity& block : follower.joined) {
    if (!load.brings(block.lineage)) continue;
    const SlotId slot = device_.find(block);
    device_.reference({&slot, 1});
    follower.pins.push_back(slot);
    ++g1_references_;
  }
}

// ── Requests ──

void WorkerTiers::unpark(RequestSlot request, bool failed, std::int64_t time_ns) {
  Park& park = parks_.at(request);
  park.origin.failed = park.origin.failed || failed;
  UNDERSTUDY_ASSERT(park.pending > 0 && parked_ > 0, "a request is woken that is not parked");
  if (--park.pending > 0) return;
  park.origin.parked_ns = time_ns - park.since_ns;
  park.done = true;
  --parked_;
  release_g1(park.pins);
  park.pins.clear();
  ready_.push_back(request);
}

void WorkerTiers::abandon(RequestSlot request) {
  const auto found = parks_.find(request);
  if (found == parks_.end()) return;
  Park& park = found->second;
  if (!park.done) {
    --parked_;
    for (const std::uint32_t load : park.loads) std::erase(loads_[load].waiters, request);
    release_g1(park.pins);
  }
  std::erase(ready_, request);
  parks_.erase(found);
}

std::optional<WorkerTiers::Origin> WorkerTiers::take_origin(RequestSlot request) {
  const auto found = parks_.find(request);
  if (found == parks_.end()) return std::nullopt;
  Origin origin = std::move(found->second.origin);
  parks_.erase(found);
  return origin;
}

}  // namespace understudy
