// From the device to the host, and from there to the tiers of the run.
#include <algorithm>
#include <exception>
#include <memory>

#include "tiers/worker_tiers.hpp"

namespace understudy {

// ── To the host ──

// Copies what was evicted and qualifies; its slots are held and the rest of `out` goes back. False: `out` is free to
// use.
bool WorkerTiers::offload(RequestSlot who, std::int64_t now_ns, std::span<SlotId> out) {
  if (evicted_.empty()) return false;
  select(evicted_slots_, evicted_);
  // Eviction goes from the ends of chains to their beginnings, without which an end is of no use: what finds no room is
  // dropped from the ends, and copies go the other way, parents first.
  const std::uint64_t room = store_.available(kG2);
  if (chosen_.size() > room) {
    const std::uint64_t dropped = chosen_.size() - room;
    totals_.dropped_blocks += dropped;
    chosen_.erase(chosen_.begin(), chosen_.begin() + static_cast<std::ptrdiff_t>(dropped));
  }
  if (chosen_.empty()) return false;
  // In the order of `out`, as what was evicted is.
  rest_.clear();
  if (chosen_.size() < out.size()) {
    auto next = chosen_.begin();
    for (const SlotId slot : out) {
      if (next != chosen_.end() && evicted_slots_[*next] == slot) {
        ++next;
      } else {
        rest_.push_back(slot);
      }
    }
  }
  std::ranges::reverse(chosen_);
  gather_chosen(evicted_slots_, evicted_);
  copies_to_.resize(copied_.size());
  store_.reserve(kG2, copied_, copied_tags_, copies_to_);  // may ask a policy, and fail: before anything has changed
  store_.give_back(kG1, rest_);
  set_held(held_ + copied_.size(), now_ns);
  g1_references_ += copied_.size();
  make_copies(now_ns, true, who, copied_slots_, copied_);
  return true;
}

// Fills chosen_ with the indices of what is neither below nor on its way, and qualifies. Where `slots` has none,
// another copy of the block stays.
void WorkerTiers::select(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) {
  store_.locate(kG2, blocks, chosen_, used_, tags_);
  if (config_.mode == OffloadMode::OnEviction) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return slots[i] == kNoSlot; });
  }
  if (config_.min_reuse > 0) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return reuse_[slots[i]] < config_.min_reuse; });
  }
  if (!used_.empty()) store_.touch(kG2, used_);  // as recent below as it was here
  if (!config_.filter || chosen_.empty()) return;
  std::vector<OffloadCandidate> candidates;
  for (const std::uint32_t i : chosen_) candidates.push_back({blocks[i], reuse_[slots[i]]});
  std::vector<std::uint8_t> keep(candidates.size(), 0);
  config_.filter->select(candidates, keep);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < keep.size(); ++i) {
    if (keep[i] != 0) chosen_[kept++] = chosen_[i];
  }
  chosen_.resize(kept);
}

void WorkerTiers::gather_chosen(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) {
  copied_slots_.resize(chosen_.size());
  copied_.resize(chosen_.size());
  copied_tags_.resize(chosen_.size());
  for (std::size_t i = 0; i < chosen_.size(); ++i) {
    copied_slots_[i] = slots[chosen_[i]];
    copied_[i] = blocks[chosen_[i]];
    copied_tags_[i] = tags_[chosen_[i]];
  }
}

void WorkerTiers::write_through(std::int64_t now_ns, std::span<const SlotId> slots,
                                std::span<const BlockIdentity> blocks) {
  if (config_.mode != OffloadMode::WriteThrough || blocks.empty()) return;
  select(slots, blocks);
  const std::uint64_t room = store_.available(kG2);
  if (chosen_.size() > room) {
    totals_.dropped_blocks += chosen_.size() - room;
    chosen_.resize(room);
  }
  if (chosen_.empty()) return;
  std::span<const std::uint32_t> tags = tags_;
  const std::size_t first = chosen_.front();
  if (chosen_.back() - first + 1 == chosen_.size()) {  // most often those behind what is there
    slots = slots.subspan(first, chosen_.size());
    blocks = blocks.subspan(first, chosen_.size());
    tags = tags.subspan(first, chosen_.size());
  } else {
    gather_chosen(slots, blocks);
    slots = copied_slots_;
    blocks = copied_;
    tags = copied_tags_;
  }
  copies_to_.resize(blocks.size());
  store_.reserve(kG2, blocks, tags, copies_to_);
  store_.retain(kG1, slots);  // its request holds them
  g1_references_ += slots.size();
  make_copies(now_ns, false, kNobody, slots, blocks);
}

void WorkerTiers::make_copies(std::int64_t now_ns, bool evicted, RequestSlot who, std::span<const SlotId> slots,
                              std::span<const BlockIdentity> blocks) {
  const std::span<const SlotId> to = copies_to_;
  totals_.offloaded_blocks += slots.size();
  for (std::size_t start = 0; start < slots.size(); start += config_.offload_batch_size) {
    const std::size_t count = std::min<std::size_t>(config_.offload_batch_size, slots.size() - start);
    if (free_copies_.empty()) {
      free_copies_.push_back(static_cast<std::uint32_t>(copies_.size()));
      copies_.emplace_back();
    }
    const std::uint32_t index = free_copies_.back();
    free_copies_.pop_back();
    Copy& copy = copies_[index];
    copy.alive = true;
    copy.evicted = evicted;
    copy.number = ++copies_made_;
    const auto keep = [&](auto& part, const auto& all) {
      const auto own = all.subspan(start, count);
      part.assign(own.begin(), own.end());
    };
    keep(copy.from, slots);
    if (!run_.shared().empty()) keep(copy.blocks, blocks);
    copy.arrival =
        arrivals_.expect(to.subspan(start, count),
                         now_ns + estimate_.copy_ns(count * config_.bytes_per_block, copying_ + queued_.size()));
    wait_for(who, now_ns, copy);
    queued_.push_back(index);
  }
  start_copies(now_ns);
}

void WorkerTiers::start_copies(std::int64_t now_ns) {
  const std::size_t room = config_.offload_concurrency - std::min<std::size_t>(copying_, config_.offload_concurrency);
  const std::size_t count = std::min(room, queued_.size());
  if (count == 0) return;
  starting_.clear();
  starting_bytes_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    starting_.push_back({kCopy, queued_[i]});
    starting_bytes_.push_back(copies_[queued_[i]].from.size() * config_.bytes_per_block);
  }
  TransferId transfer =
      hub().start_all(now_ns, std::span(&host_.down, 1), starting_bytes_, Priority::Background, *this, starting_);
  for (const Errand& errand : starting_) arrivals_.at(copies_[errand.index].arrival).transfer = transfer++;
  queued_.erase(queued_.begin(), queued_.begin() + static_cast<std::ptrdiff_t>(count));
  copying_ += static_cast<std::uint32_t>(count);
}

// A copy whose blocks stay where they were, as somebody else holds them, and for which no load waits.
bool WorkerTiers::leaves_device_as_it_is(const Errand& errand) const {
  if (static_cast<Role>(errand.role) != kCopy || on_change_) return false;
  const Copy& copy = copies_[errand.index];
  return !copy.evicted && arrivals_.at(copy.arrival).waiters.empty() && store_.all_shared(kG1, copy.from);
}

// On the host first, then further down, and only then is the device's slot free.
void WorkerTiers::copy_landed(std::uint32_t index, std::int64_t time_ns) {
  Copy& copy = copies_[index];
  --copying_;
  Arrival& arrival = arrivals_.at(copy.arrival);
  const bool wanted = !arrival.waiters.empty() || !run_.shared().empty();
  store_.land(kG2, arrival.to, wanted);  // held until those who want it have it
  for (const Arrival::Waiter& waiter : arrival.waiters) {
    source_landed(waiter.load, waiter.block, arrival.to[waiter.place], time_ns);
  }
  std::exception_ptr failure;  // of a policy of the user's: the copy has landed all the same
  if (wanted) {
    kept_.assign(arrival.to.size(), 0);
    try {
      copy_lower(time_ns, arrival.to, copy.blocks, kept_);
    } catch (...) {
      failure = std::current_exception();
    }
    rest_.clear();
    for (std::size_t i = 0; i < arrival.to.size(); ++i) {
      if (kept_[i] == 0) rest_.push_back(arrival.to[i]);
    }
    store_.release(kG2, rest_, true);
  }
  arrivals_.forget(copy.arrival);
  if (copy.evicted) {
    set_held(held_ - copy.from.size(), time_ns);
    give_back(copy.from);
  } else {
    release_g1(copy.from);
  }
  for (const RoomWaiter& waiter : copy.waiters) {
    Wait& wait = waits_[waiter.who];
    if (wait.epoch != waiter.epoch || --wait.remaining > 0) continue;
    wait.total_ns += time_ns - wait.since_ns;
    ++wait.epoch;
  }
  copy.waiters.clear();
  copy.alive = false;
  free_copies_.push_back(index);
  start_copies(time_ns);
  if (failure) std::rethrow_exception(failure);
}

// ── To the tiers of the run ──

// From `slots`, each of which is referenced once: a tier that takes a block keeps that reference, or another one.
void WorkerTiers::copy_lower(std::int64_t now_ns, std::span<const SlotId> slots, std::span<const BlockIdentity> blocks,
                             std::span<std::uint8_t> kept) {
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    SharedTier& shared = *run_.shared()[tier];
    const std::optional<Arrivals::Id> arrival = shared.expect(blocks, now_ns, chosen_);
    if (!arrival) continue;
    shared.arrivals().at(*arrival).eta_ns =
        now_ns + estimate_.lower_copy_ns(shared.config(), chosen_.size() * config_.bytes_per_block,
                                         copying_lower_[tier] + queued_lower_[tier].size());
    if (free_lower_.empty()) {
      free_lower_.push_back(static_cast<std::uint32_t>(lower_.size()));
      lower_.emplace_back();
    }
    const std::uint32_t index = free_lower_.back();
    free_lower_.pop_back();
    LowerCopy& copy = lower_[index];
    copy.tier = tier;
    copy.arrival = *arrival;
    copy.from.resize(chosen_.size());
    for (std::size_t place = 0; place < chosen_.size(); ++place) {
      const std::uint32_t i = chosen_[place];
      copy.from[place] = slots[i];
      if (kept[i] != 0) store_.reference(kG2, slots.subspan(i, 1));
      kept[i] = 1;
    }
    queued_lower_[tier].push_back(index);
    start_lower(tier, now_ns);
  }
}

void WorkerTiers::start_lower(std::size_t tier, std::int64_t now_ns) {
  SharedTier& shared = *run_.shared()[tier];
  while (copying_lower_[tier] < shared.config().offload_concurrency && !queued_lower_[tier].empty()) {
    const std::uint32_t index = queued_lower_[tier].front();
    queued_lower_[tier].pop_front();
    ++copying_lower_[tier];
    const std::array<LinkId, 2> path{ways_[tier].down, shared.backend().down};
    shared.arrivals().at(lower_[index].arrival).transfer =
        hub().start(now_ns, path, lower_[index].from.size() * config_.bytes_per_block, Priority::Background, *this,
                    {kLower, index, static_cast<std::uint32_t>(tier)});
  }
}

void WorkerTiers::lower_landed(std::uint32_t index, std::int64_t time_ns) {
  LowerCopy& copy = lower_[index];
  const std::size_t tier = copy.tier;
  --copying_lower_[tier];
  run_.shared()[tier]->land(copy.arrival, time_ns);
  store_.release(kG2, lower_[index].from, true);
  lower_[index].from.clear();
  free_lower_.push_back(index);
  start_lower(tier, time_ns);
}

}  // namespace understudy
