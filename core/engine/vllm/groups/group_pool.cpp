#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>
#include <bit>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

GroupPool::GroupPool(std::size_t num_blocks, bool events)
    : num_blocks_(num_blocks),
      blocks_(num_blocks),
      empty_(num_blocks),
      queue_(std::bit_ceil(2 * num_blocks)),
      records_(events) {
  blocks_.prefer_huge_pages(0, num_blocks);
  for (SlotId block = 0; block < num_blocks; ++block) {
    blocks_[block].references = 1;
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
  const std::span<SlotId> cached = out.subspan(empty);
  num_cached_ -= cached.size();
  evictions_ += cached.size();
  for (std::size_t taken = 0; taken < cached.size();) {
    const auto places =
        static_cast<std::uint32_t>(std::min<std::size_t>({kBatch, cached.size() - taken, queue_end_ - queue_first_}));
    for (std::uint32_t i = 0; i < places; ++i) touch_block(queued_at(queue_first_ + i));
    const std::size_t first = taken;
    for (std::uint32_t i = 0; i < places; ++i, ++queue_first_) {
      if (is_cached_at(queue_first_)) cached[taken++] = queued_at(queue_first_);
    }
    const std::span<const SlotId> batch = cached.subspan(first, taken - first);
    for (const SlotId block : batch) index_.touch(tag_of(blocks_[block].first_key));
    for (const SlotId block : batch) evict(block);
  }
}

void GroupPool::evict(SlotId block) {
  blocks_[block].references = 1;
  const std::uint32_t key = blocks_[block].first_key;
  if (key != block || blocks_[block].key.next_of_block != kNone || records_) return drop_keys(block);
  remove_equal(key);
  blocks_[block].key.end = 0;
  blocks_[block].first_key = kNone;
  --num_keys_;
}

void GroupPool::reference(SlotId block) {
  if (blocks_[block].references++ > 0) return;
  UNDERSTUDY_ASSERT(blocks_[block].first_key != kNone, "only cached blocks are found while they are free");
  --num_cached_;
}

void GroupPool::release(std::span<const SlotId> blocks) {
  for (std::size_t first = 0; first < blocks.size(); first += kBatch) {
    const std::span<const SlotId> batch = blocks.subspan(first, std::min(kBatch, blocks.size() - first));
    for (const SlotId block : batch) touch_block(block);
    for (const SlotId block : batch) {
      UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks are released");
      if (blocks_[block].references > 1) {
        --blocks_[block].references;
      } else if (blocks_[block].first_key == kNone) {
        released_.push_back(block);
      } else {
        blocks_[block].references = 0;
        enqueue(block);
      }
    }
  }
  empty_.insert(empty_.end(), released_.rbegin(), released_.rend());
  released_.clear();
}

void GroupPool::release_empty(std::span<const SlotId> blocks) {
  for ([[maybe_unused]] const SlotId block : blocks) {
    UNDERSTUDY_ASSERT(blocks_[block].references == 1 && blocks_[block].first_key == kNone,
                      "a block that is released as empty has one reference and no key");
  }
  empty_.insert(empty_.end(), blocks.begin(), blocks.end());
}

std::vector<SlotId> GroupPool::free_head(std::size_t count) const {
  std::vector<SlotId> out(empty_.rbegin(),
                          empty_.rbegin() + static_cast<std::ptrdiff_t>(std::min(count, empty_.size())));
  for (std::uint32_t place = queue_first_; place != queue_end_ && out.size() < count; ++place) {
    if (is_cached_at(place)) out.push_back(queued_at(place));
  }
  return out;
}

void GroupPool::drop_all_cached() {
  for (; queue_first_ != queue_end_; ++queue_first_) {
    if (!is_cached_at(queue_first_)) continue;
    const SlotId block = queued_at(queue_first_);
    drop_keys(block);
    blocks_[block].references = 1;
    released_.push_back(block);
  }
  empty_.insert(empty_.begin(), released_.rbegin(), released_.rend());
  released_.clear();
  num_cached_ = 0;
}

// Append a block without references, which has a key.
void GroupPool::enqueue(SlotId block) {
  if (queue_end_ - queue_first_ == queue_.size()) compact_queue();
  queue_[queue_end_ & (queue_.size() - 1)] = block;
  blocks_[block].queued = queue_end_++;
  ++num_cached_;
}

// Drop places of blocks that are not cached there: at least half of them.
void GroupPool::compact_queue() {
  std::uint32_t end = queue_first_;
  for (std::uint32_t place = queue_first_; place != queue_end_; ++place) {
    if (!is_cached_at(place)) continue;
    const SlotId block = queued_at(place);
    queue_[end & (queue_.size() - 1)] = block;
    blocks_[block].queued = end++;
  }
  queue_end_ = end;
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

std::uint32_t GroupPool::new_key(SlotId block) {
  if (blocks_[block].key.end == 0) return block;
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
  append_equal(key, content, group);
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
  if (blocks_[block].first_key == kNone) return;
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
    append_equal(key, at(key).content, at(key).group);
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

void GroupPool::append_equal(std::uint32_t key, std::uint64_t content, std::uint8_t group) {
  at(key).next_equal = kNone;
  std::uint32_t last = index_.find_or_insert(
      tag_of(content, group), key,
      [&](std::uint32_t other) { return at(other).content == content && at(other).group == group; },
      [this](std::uint32_t other) { return tag_of(other); });
  if (last == kNone) return;
  while (at(last).next_equal != kNone) last = at(last).next_equal;
  at(last).next_equal = key;
}

void GroupPool::remove_equal(std::uint32_t key) {
  const std::uint32_t next = at(key).next_equal;
  if (index_.replace(tag_of(key), key, next)) return;
  std::uint32_t before = find_key(at(key).content, at(key).group);
  UNDERSTUDY_ASSERT(before != kNone, "the key is in the index");
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
  std::size_t cached = 0;
  std::size_t keys = 0;
  for (SlotId block = 0; block < num_blocks_; ++block) {
    counted += blocks_[block].references;
    for (std::uint32_t key = blocks_[block].first_key; key != kNone; key = at(key).next_of_block) {
      require(at(key).block == block, "key ", key, " of block ", block, " names block ", at(key).block);
      ++keys;
    }
    if (blocks_[block].references > 0) continue;
    require(blocks_[block].first_key != kNone, "block ", block, " has neither references nor a key");
    ++cached;
  }
  const std::size_t free = empty_.size() + cached;
  counted -= empty_.size();
  require(counted == references, "requests hold ", references, " blocks, the pool counts ", counted);
  require(cached == num_cached_, cached, " blocks are cached, ", num_cached_, " are counted");
  const std::vector<SlotId> listed = free_head(num_blocks_ + 1);
  require(listed.size() == free, listed.size(), " blocks are listed as free, of ", free);
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const Block& block = blocks_[listed[i]];
    const bool empty = i < empty_.size();
    require(block.references == (empty ? 1 : 0), "block ", listed[i], " is listed as free and has references");
    require((block.first_key == kNone) == empty, "block ", listed[i], " is listed at the wrong end of the free list");
  }
  require(keys == num_keys_, "blocks have ", keys, " keys, ", num_keys_, " are counted");
  std::size_t used = 0;
  for (std::uint32_t key = 0; key < num_blocks_ + more_keys_.size(); ++key) used += at(key).end > 0;
  require(used == num_keys_, used, " keys are in use, ", num_keys_, " are counted");
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
