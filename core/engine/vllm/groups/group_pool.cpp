#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

GroupPool::GroupPool(std::size_t num_blocks, bool events)
    : num_blocks_(num_blocks), blocks_(num_blocks + 1), keys_(num_blocks), empty_(num_blocks), records_(events) {
  blocks_.prefer_huge_pages(0, num_blocks + 1);
  keys_.prefer_huge_pages(0, num_blocks);
  const auto sentinel = static_cast<SlotId>(num_blocks);
  blocks_[sentinel].prev = blocks_[sentinel].next = sentinel;
  for (SlotId block = 0; block < num_blocks; ++block) {
    blocks_[block].first_key = kNone;
    empty_[num_blocks - 1 - block] = block;
  }
}

// ── Blocks ──

void GroupPool::take(std::span<SlotId> out) {
  UNDERSTUDY_ASSERT(out.size() <= num_free(), "blocks are taken only while enough are free");
  const std::size_t empty = std::min(out.size(), empty_.size());
  std::reverse_copy(empty_.end() - static_cast<std::ptrdiff_t>(empty), empty_.end(), out.begin());
  empty_.resize(empty_.size() - empty);
  for (const SlotId block : out.first(empty)) {
    UNDERSTUDY_ASSERT(blocks_[block].references == 0 && blocks_[block].first_key == kNone,
                      "a block that is handed out empty has neither references nor keys");
    blocks_[block].references = 1;
  }
  const std::span<SlotId> cached = out.subspan(empty);
  if (cached.empty()) return;
  const auto sentinel = static_cast<SlotId>(num_blocks_);
  SlotId next = blocks_[sentinel].next;
  for (SlotId& block : cached) {
    block = next;
    __builtin_prefetch(&keys_[block], 1, 3);
    next = blocks_[block].next;
  }
  blocks_[sentinel].next = next;
  blocks_[next].prev = sentinel;
  num_cached_ -= cached.size();
  evictions_ += cached.size();
  const auto warm_index = [&](std::size_t i) {
    if (i < cached.size()) index_.warm(tag_of(blocks_[cached[i]].first_key));
  };
  for (std::size_t i = 0; i < kAhead; ++i) warm_index(i);
  for (std::size_t i = 0; i < cached.size(); ++i) {
    warm_index(i + kAhead);
    UNDERSTUDY_ASSERT(blocks_[cached[i]].references == 0, "a cached block has no references");
    blocks_[cached[i]].references = 1;
    drop_keys(cached[i]);
  }
}

void GroupPool::reference(SlotId block) {
  if (blocks_[block].references++ > 0) return;
  UNDERSTUDY_ASSERT(blocks_[block].first_key != kNone, "only cached blocks are found while they are free");
  unlink(block);
}

void GroupPool::release(std::span<const SlotId> blocks) {
  for (const SlotId block : blocks) {
    UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks are released");
    if (--blocks_[block].references > 0) continue;
    if (blocks_[block].first_key == kNone) {
      released_.push_back(block);
    } else {
      link(block);
    }
  }
  empty_.insert(empty_.end(), released_.rbegin(), released_.rend());
  released_.clear();
}

std::vector<SlotId> GroupPool::free_head(std::size_t count) const {
  std::vector<SlotId> out(empty_.rbegin(),
                          empty_.rbegin() + static_cast<std::ptrdiff_t>(std::min(count, empty_.size())));
  for (SlotId block = blocks_[num_blocks_].next; block != num_blocks_ && out.size() < count;
       block = blocks_[block].next) {
    out.push_back(block);
  }
  return out;
}

void GroupPool::drop_all_cached() {
  const auto sentinel = static_cast<SlotId>(num_blocks_);
  for (SlotId block = blocks_[sentinel].next; block != sentinel; block = blocks_[block].next) {
    drop_keys(block);
    released_.push_back(block);
  }
  empty_.insert(empty_.begin(), released_.rbegin(), released_.rend());
  released_.clear();
  blocks_[sentinel].prev = blocks_[sentinel].next = sentinel;
  num_cached_ = 0;
}

// Append a free block to the list of cached ones.
void GroupPool::link(SlotId block) {
  const auto sentinel = static_cast<SlotId>(num_blocks_);
  const SlotId last = blocks_[sentinel].prev;
  blocks_[block].prev = last;
  blocks_[block].next = sentinel;
  blocks_[last].next = blocks_[sentinel].prev = block;
  ++num_cached_;
}

void GroupPool::unlink(SlotId block) {
  const Block& place = blocks_[block];
  UNDERSTUDY_ASSERT(blocks_[place.prev].next == block && blocks_[place.next].prev == block,
                    "the list of cached blocks is whole");
  blocks_[place.prev].next = place.next;
  blocks_[place.next].prev = place.prev;
  --num_cached_;
}

// ── Keys ──

std::uint32_t GroupPool::find_key(std::uint64_t content, std::uint8_t group) const {
  return index_.find(tag_of(content, group),
                     [&](std::uint32_t key) { return at(key).content == content && at(key).group == group; });
}

SlotId GroupPool::find(std::uint64_t content, std::uint8_t group) const {
  const std::uint32_t key = find_key(content, group);
  return key == kNone ? kNoSlot : at(key).block;
}

void GroupPool::warm_key(std::uint64_t content, std::uint8_t group) const {
  const std::uint32_t key = index_.guess(tag_of(content, group));
  if (key < num_blocks_) __builtin_prefetch(&keys_[key], 1, 3);
}

void GroupPool::warm(SlotId block) const {
  __builtin_prefetch(&keys_[block], 1, 3);
  __builtin_prefetch(&blocks_[block], 1, 3);
}

std::uint32_t GroupPool::new_key(SlotId block) {
  if (keys_[block].end == 0) return block;
  if (spare_.empty()) {
    more_keys_.emplace_back();
    return static_cast<std::uint32_t>(num_blocks_ + more_keys_.size() - 1);
  }
  const std::uint32_t key = spare_.back();
  spare_.pop_back();
  return key;
}

void GroupPool::add_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t end, bool fresh) {
  UNDERSTUDY_ASSERT(blocks_[block].references > 0 && end > 0, "only referenced blocks get keys");
  const std::uint32_t key = new_key(block);
  at(key) = {content, block, end, kNone, kNone, schedule_, group};
  if (fresh) fresh_.insert(index_key(content, group));
  std::uint32_t* last = &blocks_[block].first_key;
  while (*last != kNone) last = &at(*last).next_of_block;
  *last = key;
  append_equal(key);
  ++num_keys_;
  ++registrations_;
}

template <typename Drops>
void GroupPool::drop_if(SlotId block, Drops drops) {
  std::uint32_t* place = &blocks_[block].first_key;
  while (*place != kNone) {
    const std::uint32_t key = *place;
    if (!drops(at(key))) {
      place = &at(key).next_of_block;
      continue;
    }
    if (records_) {
      GroupEvent event;
      event.group = at(key).group;
      event.hashes = {at(key).content};
      events_.push_back(std::move(event));
    }
    *place = at(key).next_of_block;
    remove_equal(key);
    at(key).end = 0;
    if (key >= num_blocks_) spare_.push_back(key);
    --num_keys_;
  }
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
  for (std::uint32_t key = blocks_[to].first_key; key != kNone; key = at(key).next_of_block) {
    remove_equal(key);
    at(key).block = to;
    fresh_.insert(index_key(at(key).content, at(key).group));
    append_equal(key);
  }
}

bool GroupPool::has_key(SlotId block, std::uint32_t end) const {
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = at(key).next_of_block) {
    if (at(key).end == end) return true;
  }
  return false;
}

std::uint32_t GroupPool::longest_key(SlotId block) const {
  std::uint32_t end = 0;
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = at(key).next_of_block) {
    end = std::max(end, at(key).end);
  }
  return end;
}

bool GroupPool::is_fresh(SlotId block) const {
  for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = at(key).next_of_block) {
    if (fresh_.contains(index_key(at(key).content, at(key).group))) return true;
  }
  return false;
}

void GroupPool::append_equal(std::uint32_t key) {
  at(key).next_equal = kNone;
  std::uint32_t last = find_key(at(key).content, at(key).group);
  if (last == kNone) {
    index_.insert(tag_of(key), key);
    return;
  }
  while (at(last).next_equal != kNone) last = at(last).next_equal;
  at(last).next_equal = key;
}

void GroupPool::remove_equal(std::uint32_t key) {
  const std::uint32_t first = find_key(at(key).content, at(key).group);
  UNDERSTUDY_ASSERT(first != kNone, "the key is in the index");
  const std::uint32_t next = at(key).next_equal;
  if (first == key) {
    if (next == kNone) {
      index_.erase(tag_of(key), key);
    } else {
      index_.replace(tag_of(key), key, next);
    }
    return;
  }
  std::uint32_t before = first;
  while (at(before).next_equal != key) before = at(before).next_equal;
  at(before).next_equal = next;
}

std::vector<std::uint64_t> GroupPool::contents() const {
  std::vector<std::uint64_t> out;
  out.reserve(index_.size());
  index_.for_each([&](std::uint32_t key) { out.push_back(index_key(at(key).content, at(key).group)); });
  return out;
}

void GroupPool::check(std::uint64_t references) const {
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) throw Error(ErrorKind::InvariantViolated, what...);
  };
  std::uint64_t counted = 0;
  std::size_t free = 0;
  std::size_t cached = 0;
  std::size_t keys = 0;
  for (SlotId block = 0; block < num_blocks_; ++block) {
    counted += blocks_[block].references;
    for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = at(key).next_of_block) {
      require(at(key).block == block, "key ", key, " of block ", block, " names block ", at(key).block);
      ++keys;
    }
    if (blocks_[block].references > 0) continue;
    ++free;
    cached += blocks_[block].first_key != kNone;
  }
  require(counted == references, "requests hold ", references, " blocks, the pool counts ", counted);
  require(free == num_free() && cached == num_cached_, free, " blocks are free and ", cached, " cached, ", num_free(),
          " and ", num_cached_, " are counted");
  const std::vector<SlotId> listed = free_head(num_blocks_ + 1);
  require(listed.size() == free, listed.size(), " blocks are listed as free, of ", free);
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const Block& block = blocks_[listed[i]];
    require(block.references == 0, "block ", listed[i], " is listed as free and has references");
    require((block.first_key != kNone) == (i >= empty_.size()), "block ", listed[i],
            " is listed at the wrong end of the free list");
  }
  require(keys == num_keys_, "blocks have ", keys, " keys, ", num_keys_, " are counted");
  std::size_t indexed = 0;
  index_.for_each([&](std::uint32_t first) {
    for (std::uint32_t key = first; key != kNone; key = at(key).next_equal, ++indexed) {
      require(at(key).end > 0 && at(key).content == at(first).content && at(key).group == at(first).group, "key ", key,
              " is indexed as key ", first);
    }
  });
  require(indexed == num_keys_, indexed, " keys are indexed, of ", num_keys_);
}

}  // namespace understudy
