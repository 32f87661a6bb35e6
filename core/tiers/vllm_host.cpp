#include "tiers/vllm_host.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

namespace {

// Marks a ready chunk as used by the request.
void mark_used(ChunkMemo& memo) noexcept {
  memo.uses |= kSeen;
  if ((memo.uses & kInserted) == 0) memo.uses |= kReused;
}

}  // namespace

VllmHost::VllmHost(BlockStore& store, const HostRules& rules)
    : store_(store), chunks_(store.num_blocks(kPool)), rules_(rules), order_(make_host_order(rules, chunks_)) {}

// Most chunks are where they were: looks up only the others, consecutive ones in one batch.
void VllmHost::locate(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos) {
  found_.resize(keys.size());
  claimed_.resize(keys.size());
  tags_.resize(keys.size());
  for (std::size_t i = 0; i < keys.size();) {
    if (still_at(memos[i].slot, keys[i])) {
      found_[i] = memos[i].slot;
      ++i;
      continue;
    }
    const std::size_t first = i;
    do {
      ++i;
    } while (i < keys.size() && !still_at(memos[i].slot, keys[i]));
    const std::span<std::uint32_t> tags = std::span(tags_).subspan(first, i - first);
    store_.compute_tags(keys.subspan(first, i - first), tags);
    store_.locate(kPool, keys.subspan(first, i - first), tags, &found_[first], &claimed_[first]);
    for (std::size_t j = first; j < i; ++j) {
      if (found_[j] == kNoSlot) found_[j] = claimed_[j];
      memos[j].slot = found_[j];
    }
  }
}

VllmHost::Found VllmHost::find(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos) {
  constexpr std::size_t kTogether = 16;  // most requests find nothing
  Found found;
  for (std::size_t first = 0; first < keys.size(); first += kTogether) {
    const std::size_t count = std::min(kTogether, keys.size() - first);
    locate(keys.subspan(first, count), memos.subspan(first, count));
    for (const SlotId slot : found_) {
      if (slot == kNoSlot) return found;
      ++found.chunks;
      found.writing |= !chunks_[slot].ready();
      found.loading |= chunks_[slot].loading();
    }
  }
  return found;
}

void VllmHost::touch(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos) {
  if (!rules_.touches) return;
  locate(keys, memos);
  order_->touch(keys, found_);
}

void VllmHost::begin_load(ChunkUser user, std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos,
                          std::vector<SlotId>& slots) {
  locate(keys, memos);
  slots.assign(found_.begin(), found_.end());
  store_.reference(kPool, slots);
  first_uses_.clear();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    HostChunk& chunk = chunks_[slots[i]];
    if ((memos[i].uses & kSeen) == 0) first_uses_.push_back({static_cast<std::uint32_t>(i), slots[i]});
    if (chunk.idle()) {
      order_->busy(slots[i]);
      ++loading_;
    }
    ++chunk.refs;
    mark_used(memos[i]);
  }
  order_->accessed(user, first_uses_);
}

void VllmHost::loaded(std::span<const SlotId> slots) {
  store_.release(kPool, slots);
  for (const SlotId slot : slots) {
    UNDERSTUDY_ASSERT(chunks_[slot].loading() && loading_ > 0, "a load ends that did not begin");
    if (--chunks_[slot].refs > HostChunk::kIdle) continue;
    --loading_;
    order_->idle(slot);
  }
}

bool VllmHost::begin_store(ChunkUser user, std::span<const BlockIdentity> offered, std::span<ChunkMemo> memos,
                           std::vector<std::uint32_t>& places, std::vector<SlotId>& slots) {
  places.clear();
  slots.clear();
  absent_.clear();
  names_.clear();
  evicted_.clear();
  first_uses_.clear();
  locate(offered, memos);
  for (std::size_t i = 0; i < offered.size(); ++i) {
    const SlotId slot = found_[i];
    const bool unseen = (memos[i].uses & kSeen) == 0;
    if (unseen && (slot == kNoSlot || chunks_[slot].ready())) {
      first_uses_.push_back({static_cast<std::uint32_t>(i), slot});
    }
    if (slot != kNoSlot) {
      if (chunks_[slot].ready()) mark_used(memos[i]);
      continue;
    }
    absent_.push_back(offered[i]);
    places.push_back(static_cast<std::uint32_t>(i));
    if ((memos[i].uses & kMissed) == 0) names_.push_back(offered[i].lineage);
    memos[i].uses |= kSeen | kMissed;
  }
  order_->accessed(user, first_uses_);
  order_->missed(names_);
  if (absent_.empty()) return true;

  const std::uint64_t empty = capacity() - resident_;
  victims_.clear();
  if (absent_.size() > empty) {
    // Offered chunks must not be evicted, also those that are stored already.
    for (const SlotId slot : found_) {
      if (slot != kNoSlot) chunks_[slot].shielded = true;
    }
    const bool room = order_->evict(absent_.size() - empty, victims_);
    for (const SlotId slot : found_) {
      if (slot != kNoSlot) chunks_[slot].shielded = false;
    }
    if (!room) {
      places.clear();
      return false;
    }
    for (const SlotId slot : victims_) evicted_.push_back(chunks_[slot].key);
  }
  slots.resize(absent_.size());
  store_.allocate_evicting(kPool, slots, victims_);
  // Slots that were never used come first, then the most recently freed.
  std::reverse(slots.end() - static_cast<std::ptrdiff_t>(victims_.size()), slots.end());
  store_.claim(kPool, slots, absent_);
  for (const SlotId slot : victims_) chunks_[slot].refs = HostChunk::kAbsent;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    HostChunk& chunk = chunks_[slots[i]];
    chunk.refs = HostChunk::kWriting;
    chunk.key = absent_[i].lineage;
    memos[places[i]].uses |= kInserted;
    memos[places[i]].slot = slots[i];
  }
  order_->inserted(user, places, slots);
  resident_ += slots.size() - victims_.size();
  UNDERSTUDY_ASSERT(resident_ <= capacity(), "the host holds more chunks than it has room for");
  writing_ += slots.size();
  return true;
}

void VllmHost::stored(std::span<const SlotId> slots) {
  found_.assign(slots.begin(), slots.end());
  store_.land(kPool, found_);
  for (const SlotId slot : slots) {
    chunks_[slot].refs = HostChunk::kIdle;
    order_->idle(slot);
  }
  UNDERSTUDY_ASSERT(writing_ >= slots.size(), "more chunks are stored than were being written");
  writing_ -= slots.size();
}

void VllmHost::reset() {
  std::vector<SlotId> held;
  for (SlotId slot = 0; slot < chunks_.size(); ++slot) {
    HostChunk& chunk = chunks_[slot];
    // One being written has the reference of its claim, one being loaded one for each load.
    const std::int32_t references = chunk.refs == HostChunk::kWriting ? 1 : chunk.refs - HostChunk::kIdle;
    for (std::int32_t i = 0; chunk.here() && i < references; ++i) held.push_back(slot);
    chunk = {};
  }
  store_.release(kPool, held);
  (void)store_.clear_inactive(kPool);
  // All are free now: taken in any order, and given back, the first is handed out first.
  std::vector<SlotId> all(chunks_.size());
  store_.allocate(kPool, all);
  std::ranges::sort(all);
  store_.release(kPool, all);
  order_ = make_host_order(rules_, chunks_);
  resident_ = writing_ = loading_ = 0;
}

void VllmHost::ended(std::span<const BlockIdentity> keys, std::span<ChunkMemo> memos) {
  if (rules_.touches) return;
  locate(keys, memos);
  order_->ended(memos, found_);
}

std::vector<LineageHash> VllmHost::oldest(std::size_t limit) const {
  std::vector<LineageHash> out;
  for (const SlotId slot : order_->oldest(limit)) out.push_back(chunks_[slot].key);
  return out;
}

void VllmHost::check() const {
  std::uint64_t resident = 0;
  std::uint64_t writing = 0;
  std::uint64_t loading = 0;
  for (SlotId slot = 0; slot < chunks_.size(); ++slot) {
    const HostChunk& chunk = chunks_[slot];
    resident += chunk.here();
    writing += chunk.refs == HostChunk::kWriting;
    loading += chunk.loading();
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
