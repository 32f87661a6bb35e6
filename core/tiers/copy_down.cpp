// From the device to the host, and from there to the tiers of the run.
#include <algorithm>
#include <exception>
#include <memory>

#include "tiers/worker_tiers.hpp"

namespace understudy {

namespace {

// Scratch that is long enough is left as it is: what is in it is written over.
template <typename T>
void make_long(std::vector<T>& scratch, std::size_t size) {
  if (scratch.size() < size) scratch.resize(size);
}

}  // namespace

// ── To the host ──

// Copies what was evicted and qualifies; its slots are held and the rest of `out` goes back. False: `out` is free to
// use. What was evicted stands at the ends of evicted_ and evicted_slots_, parents first: eviction goes from the ends
// of chains to their beginnings, without which an end is of no use.
bool WorkerTiers::offload(RequestSlot who, std::int64_t now_ns, std::span<SlotId> out, std::size_t evicted) {
  if (evicted == 0) return false;
  const std::span<const SlotId> slots = std::span<const SlotId>(evicted_slots_).first(out.size()).last(evicted);
  const std::span<std::uint32_t> tags = std::span(evicted_tags_).first(out.size()).last(evicted);
  const Chosen chosen =
      select(slots, std::span<const BlockIdentity>(evicted_).first(out.size()).last(evicted), tags, true);
  if (chosen.slots.empty()) return false;
  // `out` goes the other way. Most often those that were empty come first in it, and all others are copied.
  std::span<const SlotId> rest = out.first(out.size() - chosen.slots.size());
  if (out[rest.size()] != chosen.slots.back()) {
    rest_.clear();
    std::size_t next = chosen.slots.size();
    for (const SlotId slot : out) {
      if (next > 0 && chosen.slots[next - 1] == slot) {
        --next;
      } else {
        rest_.push_back(slot);
      }
    }
    rest = rest_;
  }
  make_long(copies_to_, chosen.slots.size());
  // May ask a policy, and fail: before anything has changed.
  store_.reserve(kG2, chosen.blocks, chosen.tags, std::span(copies_to_).first(chosen.slots.size()));
  store_.hand_back(kG1, rest);
  set_held(held_ + chosen.slots.size(), now_ns);
  g1_references_ += chosen.slots.size();
  make_copies(now_ns, true, who, chosen);
  return true;
}

// Of `blocks`, parents first, those that are neither below nor on their way, and qualify, as far as there is room for
// them: what finds none is dropped from the ends of chains. Where `slots` has none, another copy of the block stays.
// Those that were `evicted` are asked about from the last to the first, as they went.
WorkerTiers::Chosen WorkerTiers::select(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks,
                                        std::span<std::uint32_t> tags, bool evicted) {
  store_.locate(kG2, blocks, tags, evicted, chosen_, used_);
  if (evicted && std::ranges::count(slots, kNoSlot) > 0) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return slots[i] == kNoSlot; });
  }
  if (config_.min_reuse > 0) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return reuse_[slots[i]] < config_.min_reuse; });
  }
  if (!used_.empty()) {  // as recent below as it was here
    if (evicted) std::ranges::reverse(used_);
    store_.touch(kG2, used_);
  }
  if (config_.filter && !chosen_.empty()) ask_filter(slots, blocks, evicted);
  if (const std::uint64_t room = store_.available(kG2); chosen_.size() > room) {
    totals_.dropped_blocks += chosen_.size() - room;
    chosen_.resize(room);
  }
  const std::size_t chosen = chosen_.size();
  if (chosen == 0) return {};
  const std::size_t first = chosen_.front();
  if (chosen_.back() - first + 1 == chosen) {  // most often those behind what is there
    return {slots.subspan(first, chosen), blocks.subspan(first, chosen), tags.subspan(first, chosen)};
  }
  make_long(copied_slots_, chosen);
  make_long(copied_, chosen);
  for (std::size_t i = 0; i < chosen; ++i) {
    copied_slots_[i] = slots[chosen_[i]];
    copied_[i] = blocks[chosen_[i]];
    tags[i] = tags[chosen_[i]];  // never before its own place
  }
  return {std::span(copied_slots_).first(chosen), std::span(copied_).first(chosen), tags.first(chosen)};
}

// Leaves of chosen_ what the user wants.
void WorkerTiers::ask_filter(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, bool evicted) {
  std::vector<OffloadCandidate> candidates;
  for (const std::uint32_t i : chosen_) candidates.push_back({blocks[i], reuse_[slots[i]]});
  if (evicted) std::ranges::reverse(candidates);
  std::vector<std::uint8_t> keep(candidates.size(), 0);
  config_.filter->select(candidates, keep);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < keep.size(); ++i) {
    if (keep[evicted ? keep.size() - 1 - i : i] != 0) chosen_[kept++] = chosen_[i];
  }
  chosen_.resize(kept);
}

void WorkerTiers::write_through(RequestSlot who, std::int64_t now_ns, std::span<const SlotId> slots,
                                std::span<const BlockIdentity> blocks) {
  if (config_.mode != OffloadMode::WriteThrough || blocks.empty()) return;
  make_long(tags_, blocks.size());
  const Chosen chosen = select(slots, blocks, std::span(tags_).first(blocks.size()), false);
  if (chosen.slots.empty()) return;
  make_long(copies_to_, chosen.slots.size());
  store_.reserve(kG2, chosen.blocks, chosen.tags, std::span(copies_to_).first(chosen.slots.size()));
  make_copies(now_ns, false, who, chosen);
}

// For `who`: it waits for what is evicted, and holds what is not.
void WorkerTiers::make_copies(std::int64_t now_ns, bool evicted, RequestSlot who, const Chosen& chosen) {
  const std::span<const SlotId> slots = chosen.slots;
  const std::span<const SlotId> to = copies_to_;
  totals_.offloaded_blocks += slots.size();
  if (!evicted && who >= copies_of_.size()) copies_of_.resize(who + 1, kNoCopy);
  for (std::size_t start = 0; start < slots.size(); start += config_.offload_batch_size) {
    const std::size_t count = std::min<std::size_t>(config_.offload_batch_size, slots.size() - start);
    const std::uint32_t index = copies_.expect(to.subspan(start, count));
    Copy& copy = copies_.at(index);
    copy.alive = true;
    copy.evicted = evicted;
    copy.number = ++copies_made_;
    copy.since_ns = now_ns;
    copy.bytes = count * config_.bytes_per_block;
    copy.beside = copying_ + starting_.size() + queued_.size();
    const auto keep = [&](auto& part, const auto& all) {
      const auto own = all.subspan(start, count);
      part.assign(own.begin(), own.end());
    };
    keep(copy.from, slots);
    if (!run_.shared().empty()) keep(copy.blocks, chosen.blocks);
    if (evicted) {
      wait_for(who, now_ns, copy);
    } else {
      copy.owner = who;
      copy.before = std::exchange(copies_of_[who], index);
      if (copy.before != kNoCopy) copies_.at(copy.before).after = index;
    }
    if (queued_.empty() && may_start()) {
      starting_.push_back({kCopy, index});
    } else {
      queued_.push_back(index);
    }
  }
  start_copies(now_ns);
}

void WorkerTiers::start_copies(std::int64_t now_ns) {
  for (; !queued_.empty() && may_start(); queued_.pop_front()) starting_.push_back({kCopy, queued_.front()});
  if (starting_.empty()) return;
  starting_bytes_.clear();
  for (const Errand& errand : starting_) starting_bytes_.push_back(copies_.at(errand.index).bytes);
  TransferId transfer =
      hub().start_all(now_ns, std::span(&host_.down, 1), starting_bytes_, Priority::Background, *this, starting_);
  for (const Errand& errand : starting_) copies_.at(errand.index).transfer = transfer++;
  copying_ += static_cast<std::uint32_t>(starting_.size());
  starting_.clear();
}

// The owner may let go of the blocks before they have left.
void WorkerTiers::hold_copies_of(RequestSlot who) {
  while (copies_of_[who] != kNoCopy) {
    Copy& copy = copies_.at(copies_of_[who]);
    store_.retain(kG1, copy.from);
    g1_references_ += copy.from.size();
    disown(copy);
  }
}

void WorkerTiers::disown(Copy& copy) {
  (copy.after == kNoCopy ? copies_of_[copy.owner] : copies_.at(copy.after).before) = copy.before;
  if (copy.before != kNoCopy) copies_.at(copy.before).after = copy.after;
  copy.owner = kNobody;
  copy.before = copy.after = kNoCopy;
}

// A copy whose blocks stay where they were, as somebody else holds them, and for which no load waits.
bool WorkerTiers::leaves_device_as_it_is(const Errand& errand) const {
  if (static_cast<Role>(errand.role) != kCopy || on_change_) return false;
  const Copy& copy = copies_.at(errand.index);
  return !copy.evicted && copy.waiters.empty() && (copy.owner != kNobody || store_.all_shared(kG1, copy.from));
}

// On the host first, then further down, and only then is the device's slot free.
void WorkerTiers::copy_landed(std::uint32_t index, std::int64_t time_ns) {
  Copy& copy = copies_.at(index);
  --copying_;
  for (const auto& shared : run_.shared()) shared->warm(copy.blocks);
  const bool wanted = !copy.waiters.empty() || !run_.shared().empty();
  store_.land(kG2, copy.to, wanted);  // held until those who want it have it
  for (const Arrival::Waiter& waiter : copy.waiters) {
    source_landed(waiter.load, waiter.block, copy.to[waiter.place], time_ns);
  }
  std::exception_ptr failure;  // of a policy of the user's: the copy has landed all the same
  if (wanted) {
    kept_.assign(copy.to.size(), 0);
    bool keeps_all = false;
    try {
      keeps_all = copy_lower(time_ns, copy.to, copy.blocks, kept_);
    } catch (...) {
      failure = std::current_exception();
    }
    if (!keeps_all) {
      rest_.clear();
      for (std::size_t i = 0; i < copy.to.size(); ++i) {
        if (kept_[i] == 0) rest_.push_back(copy.to[i]);
      }
      store_.release(kG2, rest_, true);
    }
  }
  if (copy.evicted) {
    set_held(held_ - copy.from.size(), time_ns);
    give_back(copy.from);
  } else if (copy.owner != kNobody) {
    disown(copy);
  } else {
    release_g1(copy.from);
  }
  for (const RoomWaiter& waiter : copy.room_waiters) {
    Wait& wait = waits_[waiter.who];
    if (wait.epoch != waiter.epoch || --wait.remaining > 0) continue;
    wait.total_ns += time_ns - wait.since_ns;
    ++wait.epoch;
  }
  copy.room_waiters.clear();
  copy.alive = false;
  copies_.forget(index);
  start_copies(time_ns);
  if (failure) std::rethrow_exception(failure);
}

// ── To the tiers of the run ──

// From `slots`, each of which is referenced once: a tier that takes a block keeps that reference, or another one. True
// when a tier keeps all of them.
bool WorkerTiers::copy_lower(std::int64_t now_ns, std::span<const SlotId> slots, std::span<const BlockIdentity> blocks,
                             std::span<std::uint8_t> kept) {
  bool keeps_some = false;
  bool keeps_all = false;
  for (std::size_t tier = 0; tier < run_.shared().size(); ++tier) {
    SharedTier& shared = *run_.shared()[tier];
    const std::optional<Arrivals::Id> id = shared.expect(blocks, now_ns, chosen_);
    if (!id) continue;
    Arrival& arrival = shared.arrivals().at(*id);
    arrival.since_ns = now_ns;
    arrival.bytes = chosen_.size() * config_.bytes_per_block;
    arrival.beside = copying_lower_[tier] + queued_lower_[tier].size();
    const bool takes_all = chosen_.size() == slots.size();
    if (takes_all && !keeps_some) {  // most often
      arrival.from.assign(slots.begin(), slots.end());
      std::ranges::fill(kept, std::uint8_t{1});
    } else {
      arrival.from.clear();
      for (const std::uint32_t i : chosen_) {
        arrival.from.push_back(slots[i]);
        if (kept[i] != 0) store_.reference(kG2, slots.subspan(i, 1));
        kept[i] = 1;
      }
    }
    keeps_some = true;
    keeps_all = keeps_all || takes_all;
    if (queued_lower_[tier].empty() && copying_lower_[tier] < shared.config().offload_concurrency) {
      start_lower(tier, *id, now_ns);
    } else {
      queued_lower_[tier].push_back(*id);
    }
  }
  return keeps_all;
}

void WorkerTiers::start_lower(std::size_t tier, Arrivals::Id id, std::int64_t now_ns) {
  SharedTier& shared = *run_.shared()[tier];
  Arrival& arrival = shared.arrivals().at(id);
  ++copying_lower_[tier];
  const std::array<LinkId, 2> path{ways_[tier].down, shared.backend().down};
  arrival.transfer = hub().start(now_ns, path, arrival.bytes, Priority::Background, *this,
                                 {kLower, id, static_cast<std::uint32_t>(tier)});
}

void WorkerTiers::lower_landed(std::size_t tier, Arrivals::Id id, std::int64_t time_ns) {
  SharedTier& shared = *run_.shared()[tier];
  --copying_lower_[tier];
  shared.land(id, time_ns);
  store_.release(kG2, shared.arrivals().at(id).from, true);
  shared.arrivals().forget(id);
  std::deque<Arrivals::Id>& queued = queued_lower_[tier];
  while (copying_lower_[tier] < shared.config().offload_concurrency && !queued.empty()) {
    const Arrivals::Id next = queued.front();
    queued.pop_front();
    start_lower(tier, next, time_ns);
  }
}

}  // namespace understudy
