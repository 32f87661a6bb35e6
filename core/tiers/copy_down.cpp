// Copies from the device to the host, and from there to the shared tiers.
#include <algorithm>
#include <exception>
#include <memory>

#include "base/assert.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

namespace {

// Grows scratch memory; never shrinks it, because its content is overwritten.
template <typename T>
void grow_to(std::vector<T>& scratch, std::size_t size) {
  if (scratch.size() < size) scratch.resize(size);
}

}  // namespace

// ── To the host ──

// Copies evicted blocks that qualify; holds their slots and hands the others of `out` back. False: `out` is free to
// use. Evicted blocks are at the ends of evicted_ and evicted_slots_, parents first: eviction goes from the ends of
// chains to their beginnings, without which an end is useless.
bool WorkerTiers::offload(RequestSlot request, std::int64_t now_ns, std::span<SlotId> out, std::size_t evicted) {
  if (evicted == 0) return false;
  const std::span<const SlotId> slots = std::span<const SlotId>(evicted_slots_).first(out.size()).last(evicted);
  const std::span<std::uint32_t> tags = std::span(evicted_tags_).first(out.size()).last(evicted);
  const Chosen chosen =
      select(slots, std::span<const BlockIdentity>(evicted_).first(out.size()).last(evicted), tags, true);
  if (chosen.slots.empty()) return false;
  // `out` is in the opposite order. Mostly its empty slots come first and all others are copied.
  std::span<const SlotId> unused = out.first(out.size() - chosen.slots.size());
  if (out[unused.size()] != chosen.slots.back()) {
    others_.clear();
    std::size_t next = chosen.slots.size();
    for (const SlotId slot : out) {
      if (next > 0 && chosen.slots[next - 1] == slot) {
        --next;
      } else {
        others_.push_back(slot);
      }
    }
    unused = others_;
  }
  grow_to(copies_to_, chosen.slots.size());
  // May call a user-defined policy, which can throw: before anything has changed.
  store_.reserve(kG2, chosen.blocks, chosen.tags, std::span(copies_to_).first(chosen.slots.size()));
  device_.hand_back(unused);
  set_held(held_ + chosen.slots.size(), now_ns);
  g1_references_ += chosen.slots.size();
  make_copies(now_ns, true, request, chosen);
  return true;
}

// Selects the blocks, parents first, that are neither on the host nor on their way and qualify, as far as there is
// room: the ends of chains are dropped. A block whose slot is kNoSlot has another copy on the device. `evicted` blocks
// are offered to the filter in eviction order, last to first.
WorkerTiers::Chosen WorkerTiers::select(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks,
                                        std::span<std::uint32_t> tags, bool evicted) {
  store_.locate(kG2, blocks, tags, evicted && !device_.has_groups(), chosen_, used_);
  if (evicted && std::ranges::count(slots, kNoSlot) > 0) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return slots[i] == kNoSlot; });
  }
  if (config_.min_reuse > 0) {
    std::erase_if(chosen_, [&](std::uint32_t i) { return reuse_[slots[i]] < config_.min_reuse; });
  }
  if (!used_.empty()) {  // as recent below as on the device
    if (evicted) std::ranges::reverse(used_);
    store_.touch(kG2, used_);
  }
  if (config_.filter && !chosen_.empty()) apply_filter(slots, blocks, evicted);
  if (const std::uint64_t room = store_.available(kG2); chosen_.size() > room) {
    totals_.dropped_blocks += chosen_.size() - room;
    chosen_.resize(room);
  }
  const std::size_t chosen = chosen_.size();
  if (chosen == 0) return {};
  const std::size_t first = chosen_.front();
  if (chosen_.back() - first + 1 == chosen) {  // mostly those after the ones that are there
    return {slots.subspan(first, chosen), blocks.subspan(first, chosen), tags.subspan(first, chosen)};
  }
  grow_to(copied_slots_, chosen);
  grow_to(copied_, chosen);
  for (std::size_t i = 0; i < chosen; ++i) {
    copied_slots_[i] = slots[chosen_[i]];
    copied_[i] = blocks[chosen_[i]];
    tags[i] = tags[chosen_[i]];  // reads ahead of its writes
  }
  return {std::span(copied_slots_).first(chosen), std::span(copied_).first(chosen), tags.first(chosen)};
}

// Keeps the blocks of chosen_ that the user-defined filter selects.
void WorkerTiers::apply_filter(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, bool evicted) {
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

void WorkerTiers::write_through(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> slots,
                                std::span<const BlockIdentity> blocks) {
  if (config_.mode == OffloadMode::WriteThrough) copy_down(request, now_ns, slots, blocks);
}

void WorkerTiers::copy_down(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> slots,
                            std::span<const BlockIdentity> blocks) {
  if (blocks.empty()) return;
  grow_to(tags_, blocks.size());
  const Chosen chosen = select(slots, blocks, std::span(tags_).first(blocks.size()), false);
  if (chosen.slots.empty()) return;
  grow_to(copies_to_, chosen.slots.size());
  store_.reserve(kG2, chosen.blocks, chosen.tags, std::span(copies_to_).first(chosen.slots.size()));
  make_copies(now_ns, false, request, chosen);
}

// Makes copies for a request: it waits for evicted blocks, and references the others.
void WorkerTiers::make_copies(std::int64_t now_ns, bool evicted, RequestSlot request, const Chosen& chosen) {
  const std::span<const SlotId> slots = chosen.slots;
  const std::span<const SlotId> to = copies_to_;
  totals_.offloaded_blocks += slots.size();
  if (!evicted && request >= copies_of_.size()) copies_of_.resize(request + 1, kNoCopy);
  for (std::size_t start = 0; start < slots.size(); start += config_.offload_batch_size) {
    const std::size_t count = std::min<std::size_t>(config_.offload_batch_size, slots.size() - start);
    const std::uint32_t index = copies_.expect(to.subspan(start, count));
    Copy& copy = copies_.at(index);
    copy.alive = true;
    copy.evicted = evicted;
    copy.number = ++copies_made_;
    copy.since_ns = now_ns;
    copy.bytes = count * config_.bytes_per_block;
    copy.concurrent = copying_ + starting_.size() + queued_.size();
    const auto keep = [&](auto& part, const auto& all) {
      const auto own = all.subspan(start, count);
      part.assign(own.begin(), own.end());
    };
    keep(copy.from, slots);
    if (!run_.shared().empty()) keep(copy.blocks, chosen.blocks);
    if (evicted) {
      wait_for(request, now_ns, copy);
    } else {
      copy.owner = request;
      copy.before = std::exchange(copies_of_[request], index);
      if (copy.before != kNoCopy) copies_.at(copy.before).after = index;
    }
    if (queued_.empty() && may_start()) {
      starting_.push_back({kCopy, index});
    } else {
      queued_.push_back(index);
    }
  }
  UNDERSTUDY_ASSERT(store_.in(kG2, SlotState::Claimed) == copies_.slots(), "a claimed slot of the host has no copy");
  start_copies(now_ns);
}

void WorkerTiers::start_copies(std::int64_t now_ns) {
  for (; !queued_.empty() && may_start(); queued_.pop_front()) starting_.push_back({kCopy, queued_.front()});
  if (starting_.empty()) return;
  starting_bytes_.clear();
  for (const Purpose& purpose : starting_) starting_bytes_.push_back(copies_.at(purpose.index).bytes);
  TransferId transfer =
      hub().start_all(now_ns, std::span(&host_.down, 1), starting_bytes_, Priority::Background, *this, starting_);
  for (const Purpose& purpose : starting_) copies_.at(purpose.index).transfer = transfer++;
  copying_ += static_cast<std::uint32_t>(starting_.size());
  UNDERSTUDY_ASSERT(copying_ <= config_.offload_concurrency, "more copies in flight than offload_concurrency");
  starting_.clear();
}

// The owner may release the blocks before they are copied.
void WorkerTiers::hold_copies_of(RequestSlot request) {
  while (copies_of_[request] != kNoCopy) {
    Copy& copy = copies_.at(copies_of_[request]);
    device_.retain(copy.from);
    g1_references_ += copy.from.size();
    disown(copy);
  }
}

void WorkerTiers::disown(Copy& copy) {
  UNDERSTUDY_ASSERT(copy.owner != kNoRequest, "a copy without an owner is disowned");
  (copy.after == kNoCopy ? copies_of_[copy.owner] : copies_.at(copy.after).before) = copy.before;
  if (copy.before != kNoCopy) copies_.at(copy.before).after = copy.after;
  copy.owner = kNoRequest;
  copy.before = copy.after = kNoCopy;
}

// Lands on the host, then starts copies further down; only then is the device's slot free.
void WorkerTiers::copy_landed(std::uint32_t index, std::int64_t time_ns) {
  Copy& copy = copies_.at(index);
  UNDERSTUDY_ASSERT(copy.alive && copying_ > 0, "a copy landed that was not in flight");
  --copying_;
  for (const auto& shared : run_.shared()) shared->warm(copy.blocks);
  const bool wanted = !copy.waiters.empty() || !run_.shared().empty();
  store_.land(kG2, copy.to, wanted);  // held until the waiters reference it
  for (const Arrival::Waiter& waiter : copy.waiters) {
    source_landed(waiter.load, waiter.block, copy.to[waiter.place], time_ns);
  }
  std::exception_ptr failure;  // of a user-defined policy: the copy has still landed
  if (wanted) {
    kept_.assign(copy.to.size(), 0);
    bool keeps_all = false;
    try {
      keeps_all = copy_lower(time_ns, copy.to, copy.blocks, kept_);
    } catch (...) {
      failure = std::current_exception();
    }
    if (!keeps_all) {
      others_.clear();
      for (std::size_t i = 0; i < copy.to.size(); ++i) {
        if (kept_[i] == 0) others_.push_back(copy.to[i]);
      }
      store_.release(kG2, others_, true);
    }
  }
  if (copy.evicted) {
    set_held(held_ - copy.from.size(), time_ns);
    give_back(copy.from);
  } else if (copy.owner != kNoRequest) {
    disown(copy);
  } else {
    release_g1(copy.from);
  }
  for (const RoomWaiter& waiter : copy.room_waiters) {
    Wait& wait = waits_[waiter.request];
    UNDERSTUDY_ASSERT(wait.epoch != waiter.epoch || wait.remaining > 0, "a request waits for fewer than no copies");
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

// Copies from `slots`, each referenced once: a tier that takes a block keeps that reference, or adds one. Returns true
// when one tier takes all of them.
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
    arrival.concurrent = copying_lower_[tier] + queued_lower_[tier].size();
    const bool takes_all = chosen_.size() == slots.size();
    if (takes_all && !keeps_some) {  // the usual case
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
  const std::array<LinkId, 2> path{tier_links_[tier].down, shared.backend().down};
  arrival.transfer = hub().start(now_ns, path, arrival.bytes, Priority::Background, *this,
                                 {kLower, id, static_cast<std::uint32_t>(tier)});
}

void WorkerTiers::lower_landed(std::size_t tier, Arrivals::Id id, std::int64_t time_ns) {
  SharedTier& shared = *run_.shared()[tier];
  UNDERSTUDY_ASSERT(copying_lower_[tier] > 0, "a copy landed that was not in flight");
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
