// Room on the device: what has to leave for it, and who waits until it has.
#include <algorithm>

#include "tiers/worker_tiers.hpp"

namespace understudy {

WorkerTiers::Room WorkerTiers::take(RequestSlot who, std::int64_t now_ns, std::span<SlotId> out) {
  for (;;) {
    const std::uint64_t available = store_.available(kG1);
    if (out.size() > available) {
      if (out.size() > available + held_) return Room::Short;
      wait_for_held(who, now_ns, out.size() - available);
      if (who != kNobody) ++totals_.room_waits;
      return Room::Wait;
    }
    const bool copies = config_.mode == OffloadMode::OnEviction;
    if (who == kNobody && copies && evicts_what_it_must_copy(out.size())) return Room::Short;
    const std::uint64_t held_before = held_;
    std::size_t evicted = 0;
    if (copies) {
      if (evicted_.size() < out.size()) evicted_.resize(out.size());
      if (evicted_slots_.size() < out.size()) evicted_slots_.resize(out.size());
      if (evicted_tags_.size() < out.size()) evicted_tags_.resize(out.size());
      evicted = store_.allocate(kG1, out,
                                {std::span(evicted_).first(out.size()), std::span(evicted_slots_).first(out.size()),
                                 std::span(evicted_tags_).first(out.size()), kG2});
    } else {
      store_.allocate(kG1, out);
    }
    bool copied = false;
    try {
      copied = offload(who, now_ns, out, evicted);
    } catch (...) {  // a policy of the user's: what was evicted is lost, the room is not
      store_.give_back(kG1, out);
      throw;
    }
    if (!copied) {
      if (reuse_.size() > 0) {
        for (const SlotId slot : out) reuse_[slot] = 0;
      }
      return Room::Taken;
    }
    // What left at once makes room at once, in front of everything else.
    hub().run_until(now_ns);
    if (who == kNobody) {
      if (held_ > held_before) return Room::Wait;
    } else if (waiting(who)) {
      ++totals_.room_waits;
      return Room::Wait;
    }
  }
}

// Whether the next so many slots have blocks that the host lacks. Nobody waits for such a copy on behalf of a prefetch,
// so it does not begin what it cannot end.
bool WorkerTiers::evicts_what_it_must_copy(std::size_t slots) {
  if (store_.advised(kG1)) return slots > store_.in(kG1, SlotState::Reset);  // whose order nobody knows beforehand
  const std::vector<BlockIdentity> next = store_.next_evicted(kG1, slots);
  tags_.resize(next.size());
  store_.locate(kG2, next, tags_, false, chosen_, used_);
  return !chosen_.empty();
}

void WorkerTiers::note_hits(std::span<const SlotId> slots) {
  if (reuse_.size() == 0) return;
  for (const SlotId slot : slots) ++reuse_[slot];
}

// ── Waits ──

void WorkerTiers::wait_for(RequestSlot who, std::int64_t now_ns, Copy& copy) {
  if (who == kNobody) return;
  if (who >= waits_.size()) waits_.resize(who + 1);
  Wait& wait = waits_[who];
  if (wait.remaining++ == 0) wait.since_ns = now_ns;
  copy.room_waiters.push_back({who, wait.epoch});
}

// As many of the copies under way, the oldest first, as give back that many slots.
void WorkerTiers::wait_for_held(RequestSlot who, std::int64_t now_ns, std::uint64_t slots) {
  std::vector<Copy*> holding;
  for (const auto& copy : copies_.all()) {
    if (copy->alive && copy->evicted) holding.push_back(copy.get());
  }
  std::ranges::sort(holding, {}, &Copy::number);
  for (Copy* const copy : holding) {
    wait_for(who, now_ns, *copy);
    if (copy->from.size() >= slots) return;
    slots -= copy->from.size();
  }
}

void WorkerTiers::stop_waiting(RequestSlot who, std::int64_t now_ns) {
  if (!waiting(who)) return;
  Wait& wait = waits_[who];
  wait.total_ns += now_ns - wait.since_ns;
  wait.remaining = 0;
  ++wait.epoch;
}

// Drops references; not all of them are the last.
void WorkerTiers::release_g1(std::span<const SlotId> slots) {
  const std::uint64_t before = store_.available(kG1);
  store_.release(kG1, slots, true);
  g1_references_ -= slots.size();
  released_ += store_.available(kG1) - before;
}

void WorkerTiers::give_back(std::span<const SlotId> slots) {
  store_.hand_back(kG1, slots);
  g1_references_ -= slots.size();
  released_ += slots.size();
}

// What was held until now counts; what is held for no time does not.
void WorkerTiers::set_held(std::uint64_t held, std::int64_t now_ns) {
  if (now_ns > held_since_ns_) {
    totals_.held_block_ns += held_ * static_cast<std::uint64_t>(now_ns - held_since_ns_);
    totals_.held_max_blocks = std::max(totals_.held_max_blocks, held_);
  }
  held_since_ns_ = now_ns;
  held_ = held;
}

}  // namespace understudy
