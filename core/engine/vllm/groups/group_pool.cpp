#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

GroupPool::GroupPool(std::size_t num_blocks, bool events) : blocks_(num_blocks + 1), records_(events) {
  const auto sentinel = static_cast<SlotId>(num_blocks);
  blocks_[sentinel].prev = blocks_[sentinel].next = sentinel;
  for (SlotId block = 0; block < num_blocks; ++block) link(block, sentinel);
}

// ── Blocks ──

SlotId GroupPool::take() {
  const auto sentinel = static_cast<SlotId>(num_blocks());
  const SlotId block = blocks_[sentinel].next;
  UNDERSTUDY_ASSERT(block != sentinel, "a block is taken only while one is free");
  unlink(block);
  blocks_[block].references = 1;
  if (blocks_[block].first_key != kNone) {
    ++evictions_;
    drop_keys(block);
  }
  return block;
}

void GroupPool::reference(SlotId block) {
  if (blocks_[block].references++ == 0) unlink(block);
}

void GroupPool::release(std::span<const SlotId> blocks) {
  const auto sentinel = static_cast<SlotId>(num_blocks());
  const SlotId front = blocks_[sentinel].next;
  for (const SlotId block : blocks) {
    UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks are released");
    if (--blocks_[block].references > 0) continue;
    if (blocks_[block].first_key == kNone) {
      link(block, front);
    } else {
      keyed_.push_back(block);
    }
  }
  for (const SlotId block : keyed_) link(block, sentinel);
  keyed_.clear();
}

std::vector<SlotId> GroupPool::free_head(std::size_t count) const {
  std::vector<SlotId> out;
  for (SlotId block = blocks_[num_blocks()].next; block != num_blocks() && out.size() < count;
       block = blocks_[block].next) {
    out.push_back(block);
  }
  return out;
}

void GroupPool::drop_all_cached() {
  for (SlotId block = blocks_[num_blocks()].next; block != num_blocks(); block = blocks_[block].next) drop_keys(block);
}

// Insert a free block into the free list, before `before`.
void GroupPool::link(SlotId block, SlotId before) {
  Block& place = blocks_[block];
  place.next = before;
  place.prev = blocks_[before].prev;
  blocks_[place.prev].next = block;
  blocks_[before].prev = block;
  ++num_free_;
  num_cached_ += place.first_key != kNone;
}

void GroupPool::unlink(SlotId block) {
  const Block& place = blocks_[block];
  blocks_[place.prev].next = place.next;
  blocks_[place.next].prev = place.prev;
  --num_free_;
  num_cached_ -= place.first_key != kNone;
}

// ── Keys ──

SlotId GroupPool::find(std::uint64_t content, std::uint8_t group) const {
  const std::uint32_t key = index_.find(index_key(content, group));
  return key == kNone ? kNoSlot : keys_[key].block;
}

void GroupPool::add_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t end, bool fresh) {
  UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks get keys");
  std::uint32_t key = 0;
  if (spare_keys_.empty()) {
    key = static_cast<std::uint32_t>(keys_.size());
    keys_.emplace_back();
  } else {
    key = spare_keys_.back();
    spare_keys_.pop_back();
  }
  keys_[key] = {content, block, end, kNone, kNone, schedule_, group};
  if (fresh) fresh_.insert(index_key(content, group));
  std::uint32_t* last = &blocks_[block].first_key;
  while (*last != kNone) last = &keys_[*last].next_of_block;
  *last = key;
  append_equal(key);
  ++num_keys_;
  ++registrations_;
}

template <typename Drops>
void GroupPool::drop_if(SlotId block, Drops drops) {
  const bool was_cached = blocks_[block].references == 0 && blocks_[block].first_key != kNone;
  std::uint32_t* place = &blocks_[block].first_key;
  while (*place != kNone) {
    const std::uint32_t key = *place;
    if (!drops(keys_[key])) {
      place = &keys_[key].next_of_block;
      continue;
    }
    if (records_) {
      GroupEvent event;
      event.group = keys_[key].group;
      event.hashes = {keys_[key].content};
      events_.push_back(std::move(event));
    }
    *place = keys_[key].next_of_block;
    remove_equal(key);
    spare_keys_.push_back(key);
    --num_keys_;
  }
  if (was_cached && blocks_[block].first_key == kNone) --num_cached_;
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
  UNDERSTUDY_ASSERT(blocks_[to].first_key == kNone, "a block that takes over keys has none");
  blocks_[to].first_key = blocks_[from].first_key;
  blocks_[from].first_key = kNone;
  for (std::uint32_t key = blocks_[to].first_key; key != kNone; key = keys_[key].next_of_block) {
    remove_equal(key);
    keys_[key].block = to;
    fresh_.insert(index_key(keys_[key].content, keys_[key].group));
    append_equal(key);
  }
}

bool GroupPool::has_key(SlotId block, std::uint32_t end) const {
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = keys_[key].next_of_block) {
    if (keys_[key].end == end) return true;
  }
  return false;
}

std::uint32_t GroupPool::longest_key(SlotId block) const {
  std::uint32_t end = 0;
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = keys_[key].next_of_block) {
    end = std::max(end, keys_[key].end);
  }
  return end;
}

bool GroupPool::is_fresh(SlotId block) const {
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = keys_[key].next_of_block) {
    if (fresh_.contains(index_key(keys_[key].content, keys_[key].group))) return true;
  }
  return false;
}

void GroupPool::append_equal(std::uint32_t key) {
  keys_[key].next_equal = kNone;
  std::uint32_t& first = index_.insert(index_key(keys_[key].content, keys_[key].group));
  if (first == kNone) {
    first = key;
    return;
  }
  std::uint32_t last = first;
  while (keys_[last].next_equal != kNone) last = keys_[last].next_equal;
  keys_[last].next_equal = key;
}

void GroupPool::remove_equal(std::uint32_t key) {
  const std::uint64_t content = index_key(keys_[key].content, keys_[key].group);
  std::uint32_t& first = index_.at(content);
  if (first == key) {
    if (keys_[key].next_equal == kNone) {
      index_.erase(content);
    } else {
      first = keys_[key].next_equal;
    }
    return;
  }
  std::uint32_t before = first;
  while (keys_[before].next_equal != key) before = keys_[before].next_equal;
  keys_[before].next_equal = keys_[key].next_equal;
}

std::vector<std::uint64_t> GroupPool::contents() const {
  std::vector<std::uint64_t> out;
  out.reserve(index_.size());
  index_.for_each([&out](std::uint64_t content) { out.push_back(content); });
  return out;
}

void GroupPool::check(std::uint64_t references) const {
  std::uint64_t counted = 0;
  std::size_t free = 0;
  std::size_t cached = 0;
  for (std::size_t i = 0; i < num_blocks(); ++i) {
    counted += blocks_[i].references;
    if (blocks_[i].references > 0) continue;
    ++free;
    cached += blocks_[i].first_key != kNone;
  }
  const std::size_t listed = free_head(num_blocks() + 1).size();
  if (counted != references || free != num_free_ || listed != num_free_ || cached != num_cached_) {
    throw Error(ErrorKind::InvariantViolated, "requests hold ", references, " blocks, the pool counts ", counted, "; ",
                free, " blocks are free, ", num_free_, " are counted and ", listed, " listed; ", cached,
                " are cached, ", num_cached_, " are counted");
  }
  if (num_keys_ + spare_keys_.size() != keys_.size()) {
    throw Error(ErrorKind::InvariantViolated, num_keys_, " keys and ", spare_keys_.size(), " spare ones are not ",
                keys_.size());
  }
}

}  // namespace understudy
