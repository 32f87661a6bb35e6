#include "tiers/vllm_host.hpp"

#include <algorithm>

namespace understudy {

VllmHost::VllmHost(BlockStore& store, HostPolicy policy, bool touches) : store_(store), touches_(touches) {
  const std::size_t capacity = store.num_blocks(kPool);
  chunks_.refs.assign(capacity, HostChunks::kAbsent);
  chunks_.shielded.assign(capacity, 0);
  keys_.resize(capacity);
  order_ = make_host_order(policy, touches, chunks_);
}

// Where each of them is, written or being written.
void VllmHost::locate(std::span<const BlockIdentity> keys) {
  found_.resize(keys.size());
  claimed_.resize(keys.size());
  store_.locate(kPool, keys, found_.data(), claimed_.data());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (found_[i] == kNoSlot) found_[i] = claimed_[i];
  }
}

VllmHost::Found VllmHost::find(const BlockIdentity& key) const {
  SlotId slot = kNoSlot;
  SlotId claimed = kNoSlot;
  store_.locate(kPool, {&key, 1}, &slot, &claimed);
  if (slot == kNoSlot) return {claimed != kNoSlot, false, false};
  return {true, true, chunks_.refs[slot] > 0};
}

void VllmHost::touch(std::span<const BlockIdentity> keys) {
  if (!touches_) return;
  locate(keys);
  names_.resize(keys.size());
  std::ranges::transform(keys, names_.begin(), &BlockIdentity::lineage);
  order_->touch(names_, found_);
}

void VllmHost::begin_load(std::span<const BlockIdentity> keys, std::span<std::uint8_t> uses,
                          std::vector<SlotId>& slots) {
  locate(keys);
  slots.assign(found_.begin(), found_.end());
  store_.reference(kPool, slots);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (chunks_.refs[slots[i]] == 0) {
      order_->busy(slots[i]);
      ++loading_;
    }
    ++chunks_.refs[slots[i]];
    uses[i] |= kSeen;
    if ((uses[i] & kInserted) == 0) uses[i] |= kReused;
  }
}

void VllmHost::loaded(std::span<const SlotId> slots) {
  store_.release(kPool, slots);
  for (const SlotId slot : slots) {
    if (--chunks_.refs[slot] > 0) continue;
    --loading_;
    order_->idle(slot);
  }
}

bool VllmHost::begin_store(std::span<const BlockIdentity> offered, std::span<std::uint8_t> uses,
                           std::vector<std::uint32_t>& places, std::vector<SlotId>& slots) {
  places.clear();
  slots.clear();
  absent_.clear();
  names_.clear();
  evicted_.clear();
  locate(offered);
  for (std::size_t i = 0; i < offered.size(); ++i) {
    const SlotId slot = found_[i];
    if (slot != kNoSlot) {
      if (!chunks_.ready(slot)) continue;
      uses[i] |= kSeen;
      if ((uses[i] & kInserted) == 0) uses[i] |= kReused;
      continue;
    }
    absent_.push_back(offered[i]);
    places.push_back(static_cast<std::uint32_t>(i));
    if ((uses[i] & kMissed) == 0) names_.push_back(offered[i].lineage);
    uses[i] |= kSeen | kMissed;
  }
  order_->missed(names_);
  if (absent_.empty()) return true;

  const std::uint64_t empty = capacity() - resident_;
  victims_.clear();
  if (absent_.size() > empty) {
    // What is offered stays, whether or not somebody has it stored already.
    for (const SlotId slot : found_) {
      if (slot != kNoSlot) chunks_.shielded[slot] = 1;
    }
    const bool room = order_->evict(absent_.size() - empty, victims_);
    for (const SlotId slot : found_) {
      if (slot != kNoSlot) chunks_.shielded[slot] = 0;
    }
    if (!room) {
      places.clear();
      return false;
    }
    for (const SlotId slot : victims_) evicted_.push_back(keys_[slot]);
  }
  slots.resize(absent_.size());
  store_.allocate_evicting(kPool, slots, victims_);
  // Slots that were never used come first; behind them, what was freed last.
  std::reverse(slots.end() - static_cast<std::ptrdiff_t>(victims_.size()), slots.end());
  store_.claim(kPool, slots, absent_);
  for (const SlotId slot : victims_) chunks_.refs[slot] = HostChunks::kAbsent;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    chunks_.refs[slots[i]] = HostChunks::kWriting;
    keys_[slots[i]] = absent_[i].lineage;
    order_->inserted(slots[i], keys_[slots[i]]);
    uses[places[i]] |= kInserted;
  }
  resident_ += slots.size() - victims_.size();
  writing_ += slots.size();
  return true;
}

void VllmHost::stored(std::span<const SlotId> slots) {
  found_.assign(slots.begin(), slots.end());
  store_.land(kPool, found_);
  for (const SlotId slot : slots) {
    chunks_.refs[slot] = 0;
    order_->idle(slot);
  }
  writing_ -= slots.size();
}

void VllmHost::ended(std::span<const BlockIdentity> keys, std::span<const std::uint8_t> uses) {
  if (touches_) return;
  locate(keys);
  order_->ended(uses, found_);
}

std::vector<LineageHash> VllmHost::oldest(std::size_t limit) const {
  std::vector<LineageHash> out;
  for (const SlotId slot : order_->oldest(limit)) out.push_back(keys_[slot]);
  return out;
}

void VllmHost::check() const {
  std::uint64_t resident = 0;
  std::uint64_t writing = 0;
  std::uint64_t loading = 0;
  for (const std::int32_t refs : chunks_.refs) {
    resident += refs != HostChunks::kAbsent;
    writing += refs == HostChunks::kWriting;
    loading += refs > 0;
  }
  const std::uint64_t held = store_.metrics(kPool).active_blocks;
  if (resident != resident_ || writing != writing_ || loading != loading_ || loading != held ||
      writing != store_.in(kPool, SlotState::Claimed)) {
    throw Error(ErrorKind::InvariantViolated, "the host has ", resident, " chunks, ", writing, " being written and ",
                loading, " being loaded, where it counts ", resident_, ", ", writing_, ", ", loading_,
                " and its store ", held, " held");
  }
}

}  // namespace understudy
