// Room on the device: what has to leave for it, and requests that wait until it has.
#include <algorithm>

#include "base/assert.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

WorkerTiers::Room WorkerTiers::take(RequestSlot request, std::int64_t now_ns, std::span<SlotId> out) {
  for (;;) {
    const std::uint64_t available = device_.available();
    if (out.size() > available) {
      if (out.size() > available + held_) return Room::Short;
      wait_for_held(request, now_ns, out.size() - available);
      if (request != kNoRequest) ++totals_.room_waits;
      return Room::Wait;
    }
    const bool copies = config_.mode == OffloadMode::OnEviction;
    if (request == kNoRequest && copies && eviction_needs_copies(out.size())) return Room::Short;
    const std::uint64_t held_before = held_;
    std::size_t evicted = 0;
    if (copies) {
      if (evicted_.size() < out.size()) evicted_.resize(out.size());
      if (evicted_slots_.size() < out.size()) evicted_slots_.resize(out.size());
      if (evicted_tags_.size() < out.size()) evicted_tags_.resize(out.size());
      evicted =
          device_.allocate(out, {std::span(evicted_).first(out.size()), std::span(evicted_slots_).first(out.size()),
                                 std::span(evicted_tags_).first(out.size()), kG2});
    } else {
      device_.allocate(out);
    }
    bool copied = false;
    try {
      copied = offload(request, now_ns, out, evicted);
    } catch (...) {  // a user-defined filter or host policy
      undo_eviction(out, evicted);
      throw;
    }
    if (!copied) {
      if (reuse_.size() > 0) {
        for (const SlotId slot : out) reuse_[slot] = 0;
      }
      return Room::Taken;
    }
    // A copy that ended at once makes room at once, before everything else.
    hub().run_until(now_ns);
    if (request == kNoRequest) {
      if (held_ > held_before) return Room::Wait;
    } else if (waiting(request)) {
      ++totals_.room_waits;
      return Room::Wait;
    }
  }
}

// Caches the blocks that were evicted for `out` again, as the most recently used, and frees the other slots of `out`.
void WorkerTiers::undo_eviction(std::span<const SlotId> out, std::size_t evicted) {
  const auto blocks = std::span<const BlockIdentity>(evicted_).first(out.size()).last(evicted);
  const auto slots = std::span<const SlotId>(evicted_slots_).first(out.size()).last(evicted);
  std::vector<SlotId> empty(out.begin(), out.end());
  std::vector<SlotId> cached;
  std::vector<BlockIdentity> names;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNoSlot) continue;  // another copy of the block is cached
    std::erase(empty, slots[i]);
    cached.push_back(slots[i]);
    names.push_back(blocks[i]);
  }
  device_.give_back(empty);
  device_.commit(cached, names);
  device_.release(cached);
}

// True if the next `slots` slots hold blocks that the host lacks. A prefetch does not start such copies, because no
// request waits for them.
bool WorkerTiers::eviction_needs_copies(std::size_t slots) {
  if (device_.advised())
    return slots > store_.in(kG1, SlotState::Reset);  // the order of a user-defined policy is unknown
  const std::vector<BlockIdentity> next = device_.next_evicted(slots);
  tags_.resize(next.size());
  store_.locate(kG2, next, tags_, false, chosen_, used_);
  return !chosen_.empty();
}

void WorkerTiers::note_hits(std::span<const SlotId> slots) {
  if (reuse_.size() == 0) return;
  for (const SlotId slot : slots) ++reuse_[slot];
}

// ── Waits ──

void WorkerTiers::wait_for(RequestSlot request, std::int64_t now_ns, Copy& copy) {
  if (request == kNoRequest) return;
  if (request >= waits_.size()) waits_.resize(request + 1);
  Wait& wait = waits_[request];
  if (wait.remaining++ == 0) wait.since_ns = now_ns;
  copy.room_waiters.push_back({request, wait.epoch});
}

// Waits for as many copies in flight, oldest first, as release that many slots.
void WorkerTiers::wait_for_held(RequestSlot request, std::int64_t now_ns, std::uint64_t slots) {
  std::vector<Copy*> holding;
  for (const auto& copy : copies_.all()) {
    if (copy->alive && copy->evicted) holding.push_back(copy.get());
  }
  std::ranges::sort(holding, {}, &Copy::number);
  for (Copy* const copy : holding) {
    wait_for(request, now_ns, *copy);
    if (copy->from.size() >= slots) return;
    slots -= copy->from.size();
  }
}

void WorkerTiers::stop_waiting(RequestSlot request, std::int64_t now_ns) {
  if (!waiting(request)) return;
  Wait& wait = waits_[request];
  wait.total_ns += now_ns - wait.since_ns;
  wait.remaining = 0;
  ++wait.epoch;
}

// Drops references, some of which are not the last.
void WorkerTiers::release_g1(std::span<const SlotId> slots) {
  const std::uint64_t before = device_.available();
  UNDERSTUDY_ASSERT(g1_references_ >= slots.size(), "references to the device fall below zero");
  device_.release(slots);
  g1_references_ -= slots.size();
  released_ += device_.available() - before;
}

void WorkerTiers::give_back(std::span<const SlotId> slots) {
  device_.hand_back(slots);
  UNDERSTUDY_ASSERT(g1_references_ >= slots.size(), "references to the device fall below zero");
  g1_references_ -= slots.size();
  released_ += slots.size();
}

// Accumulates the time that slots were held; slots held for no time do not count.
void WorkerTiers::set_held(std::uint64_t held, std::int64_t now_ns) {
  UNDERSTUDY_ASSERT(now_ns >= held_since_ns_, "the clock of a worker's tiers goes backwards");
  UNDERSTUDY_ASSERT(device_.has_groups() || held <= store_.in(kG1, SlotState::Mutable),
                    "more slots are held than are in use");
  if (now_ns > held_since_ns_) {
    totals_.held_block_ns += held_ * static_cast<std::uint64_t>(now_ns - held_since_ns_);
    totals_.held_max_blocks = std::max(totals_.held_max_blocks, held_);
  }
  held_since_ns_ = now_ns;
  held_ = held;
}

}  // namespace understudy
