#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"

namespace understudy {

GroupPool::GroupPool(std::size_t num_blocks, bool events) : blocks_(num_blocks), empty_(num_blocks), records_(events) {
  for (SlotId block = 0; block < num_blocks; ++block) empty_[num_blocks - 1 - block] = block;
}

// ── Blocks ──

void GroupPool::take(std::span<SlotId> out) {
  UNDERSTUDY_ASSERT(out.size() <= num_free(), "blocks are taken only while enough are free");
  for (SlotId& block : out) {
    if (!empty_.empty()) {
      block = empty_.back();
      empty_.pop_back();
    } else {
      block = front_;
      unqueue(block);
      drop_keys(block);
      ++evictions_;
    }
    blocks_[block].references = 1;
  }
}

bool GroupPool::reference(SlotId block) {
  const bool was_free = blocks_[block].references++ == 0;
  UNDERSTUDY_ASSERT(!was_free || !blocks_[block].keys.empty(), "only cached blocks are found while they are free");
  if (was_free) unqueue(block);
  return was_free;
}

std::size_t GroupPool::release(std::span<const SlotId> blocks) {
  std::size_t freed = 0;
  for (const SlotId block : blocks) {
    UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks are released");
    if (--blocks_[block].references > 0) continue;
    ++freed;
    if (blocks_[block].keys.empty()) {
      released_.push_back(block);
    } else {
      queue(block);
    }
  }
  empty_.insert(empty_.end(), released_.rbegin(), released_.rend());
  released_.clear();
  return freed;
}

void GroupPool::queue(SlotId block) {
  blocks_[block].before = back_;
  blocks_[block].after = kNoSlot;
  (back_ != kNoSlot ? blocks_[back_].after : front_) = block;
  back_ = block;
  ++num_cached_;
}

void GroupPool::unqueue(SlotId block) {
  const auto [before, after] = std::pair(blocks_[block].before, blocks_[block].after);
  (before != kNoSlot ? blocks_[before].after : front_) = after;
  (after != kNoSlot ? blocks_[after].before : back_) = before;
  --num_cached_;
}

std::vector<SlotId> GroupPool::free_head(std::size_t count) const {
  std::vector<SlotId> out(empty_.rbegin(),
                          empty_.rbegin() + static_cast<std::ptrdiff_t>(std::min(count, empty_.size())));
  for (SlotId block = front_; block != kNoSlot && out.size() < count; block = blocks_[block].after) {
    out.push_back(block);
  }
  return out;
}

std::uint64_t GroupPool::cached_before(std::span<const std::vector<SlotId>> hits) const {
  constexpr std::uint64_t kMostVisited = 1024;
  std::unordered_set<SlotId> found;
  for (const std::vector<SlotId>& blocks : hits) {
    for (const SlotId block : blocks) {
      if (block != kNoSlot && references(block) == 0) found.insert(block);
    }
  }
  if (found.empty()) return num_cached_;
  std::uint64_t before = 0;
  for (SlotId block = front_; before < kMostVisited && !found.contains(block); block = blocks_[block].after) ++before;
  return before;
}

void GroupPool::drop_all_cached() {
  while (front_ != kNoSlot) {
    released_.push_back(front_);
    unqueue(released_.back());
    drop_keys(released_.back());
  }
  empty_.insert(empty_.begin(), released_.rbegin(), released_.rend());
  released_.clear();
}

// ── Keys ──

SlotId GroupPool::find(const GroupKey& key) const {
  const ShortList<SlotId>* const found = index_.find(key.hash());
  return found == nullptr ? kNoSlot : (*found)[0];
}

void GroupPool::add_key(SlotId block, const GroupKey& key, std::uint32_t end, bool fresh) {
  UNDERSTUDY_ASSERT(blocks_[block].references > 0 && end > 0, "only referenced blocks get keys");
  if (fresh) fresh_.insert(key.hash());
  drop_shorter(block, end);
  index_[key.hash()].append({&block, 1});
  blocks_[block].keys.push_back({key, end, schedule_});
  ++registrations_;
}

void GroupPool::unlink(SlotId block, const GroupKey& name) {
  ShortList<SlotId>& blocks = *index_.find(name.hash());
  blocks.remove(block);
  if (blocks.empty()) index_.erase(name.hash());
}

template <typename Drops>
void GroupPool::drop_if(SlotId block, Drops drops) {
  std::erase_if(blocks_[block].keys, [&](const Key& key) {
    if (!drops(key)) return false;
    if (records_) {
      // Keys that are dropped one after another are one event per group.
      if (events_.empty() || events_.back().stored || events_.back().group != key.name.group) {
        events_.emplace_back().group = key.name.group;
      }
      events_.back().hashes.push_back(key.name.content);
    }
    unlink(block, key.name);
    return true;
  });
}

void GroupPool::drop_keys(SlotId block) {
  drop_if(block, [](const Key&) { return true; });
}

void GroupPool::drop_shorter(SlotId block, std::uint32_t end) {
  drop_if(block, [&](const Key& key) { return key.end < end; });
}

void GroupPool::drop_new(SlotId block) {
  drop_if(block, [&](const Key& key) { return key.schedule == schedule_; });
}

void GroupPool::move_keys(SlotId from, SlotId to) {
  UNDERSTUDY_ASSERT(blocks_[from].references > 0 && blocks_[to].references > 0, "keys move between referenced blocks");
  UNDERSTUDY_ASSERT(blocks_[to].keys.empty(), "a block that takes over keys has none");
  for (const Key& key : blocks_[from].keys) {
    unlink(from, key.name);
    index_[key.name.hash()].append({&to, 1});
    fresh_.insert(key.name.hash());
  }
  blocks_[to].keys = std::exchange(blocks_[from].keys, {});
}

bool GroupPool::has_key(SlotId block, std::uint32_t end) const {
  return std::ranges::any_of(blocks_[block].keys, [&](const Key& key) { return key.end == end; });
}

std::uint32_t GroupPool::longest_key(SlotId block) const {
  std::uint32_t end = 0;
  for (const Key& key : blocks_[block].keys) end = std::max(end, key.end);
  return end;
}

bool GroupPool::is_fresh(SlotId block) const {
  return std::ranges::any_of(blocks_[block].keys, [&](const Key& key) { return fresh_.contains(key.name.hash()); });
}

std::vector<std::uint64_t> GroupPool::contents() const {
  std::vector<std::uint64_t> out;
  index_.for_each([&](std::uint64_t hash, const ShortList<SlotId>&) { out.push_back(hash); });
  return out;
}

}  // namespace understudy
