#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

GroupPool::GroupPool(std::size_t num_blocks, bool events)
    : num_blocks_(num_blocks),
      blocks_(num_blocks),
      keys_(num_blocks),
      empty_(num_blocks),
      queue_(std::bit_ceil(2 * num_blocks)),
      records_(events) {
  blocks_.prefer_huge_pages(0, num_blocks);
  keys_.prefer_huge_pages(0, num_blocks);
  queue_.prefer_huge_pages(0, queue_.size());
  for (SlotId block = 0; block < num_blocks; ++block) {
    blocks_[block].references = 1;
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
  std::array<Queued, kBatch> batch;
  for (std::size_t taken = 0; taken < cached.size();) {
    const auto places =
        static_cast<std::uint32_t>(std::min<std::size_t>({kBatch, cached.size() - taken, queue_end_ - queue_first_}));
    std::size_t size = 0;
    for (std::uint32_t i = 0; i < places; ++i, ++queue_first_) {
      batch[size] = queued_at(queue_first_);
      size += batch[size].block != kNoSlot ? 1 : 0;
    }
    for (std::size_t i = 0; i < size; ++i) index_.touch(batch[i].tag);
    for (std::size_t i = 0; i < size; ++i) {
      evict(batch[i]);
      cached[taken++] = batch[i].block;
    }
  }
}

void GroupPool::evict(Queued cached) {
  if (cached.tag == kSeveralTags || records_) {
    blocks_[cached.block].references = 1;
    return drop_keys(cached.block);
  }
  if (!index_.erase_sole(cached.tag, cached.block)) remove_equal(cached.block, cached.tag);
  blocks_[cached.block] = {1, kNoKey, 0};
  --num_keys_;
}

void GroupPool::reference(SlotId block) {
  if (blocks_[block].references > 0) {
    ++blocks_[block].references;
    return;
  }
  UNDERSTUDY_ASSERT(blocks_[block].keys != kNoKey, "only cached blocks are found while they are free");
  Queued& queued = queued_at(blocks_[block].place);
  queued.block = kNoSlot;
  blocks_[block].references = 1;
  blocks_[block].place = queued.tag;
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
      } else if (blocks_[block].keys == kNoKey) {
        released_.push_back(block);
      } else {
        enqueue(block);
      }
    }
  }
  empty_.insert(empty_.end(), released_.rbegin(), released_.rend());
  released_.clear();
}

void GroupPool::release_empty(std::span<const SlotId> blocks) {
  for ([[maybe_unused]] const SlotId block : blocks) {
    UNDERSTUDY_ASSERT(blocks_[block].references == 1 && blocks_[block].keys == kNoKey,
                      "a block that is released as empty has one reference and no key");
  }
  empty_.insert(empty_.end(), blocks.begin(), blocks.end());
}

std::vector<SlotId> GroupPool::free_head(std::size_t count) const {
  std::vector<SlotId> out(empty_.rbegin(),
                          empty_.rbegin() + static_cast<std::ptrdiff_t>(std::min(count, empty_.size())));
  for (std::uint32_t place = queue_first_; place != queue_end_ && out.size() < count; ++place) {
    if (queued_at(place).block != kNoSlot) out.push_back(queued_at(place).block);
  }
  return out;
}

void GroupPool::drop_all_cached() {
  for (; queue_first_ != queue_end_; ++queue_first_) {
    const SlotId block = queued_at(queue_first_).block;
    if (block == kNoSlot) continue;
    drop_keys(block);
    blocks_[block].references = 1;
    released_.push_back(block);
  }
  empty_.insert(empty_.begin(), released_.rbegin(), released_.rend());
  released_.clear();
  num_cached_ = 0;
}

// Append a block with a key whose last reference goes.
void GroupPool::enqueue(SlotId block) {
  if (queue_end_ - queue_first_ == queue_.size()) compact_queue();
  Block& b = blocks_[block];
  queued_at(queue_end_) = {block, b.keys == kOwnKey ? b.place : kSeveralTags};
  b.references = 0;
  b.place = queue_end_++;
  ++num_cached_;
}

// Drop places of blocks that are not cached there: at least half of them.
void GroupPool::compact_queue() {
  std::uint32_t end = queue_first_;
  for (std::uint32_t place = queue_first_; place != queue_end_; ++place) {
    const Queued queued = queued_at(place);
    if (queued.block == kNoSlot) continue;
    queued_at(end) = queued;
    blocks_[queued.block].place = end++;
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

std::uint32_t GroupPool::another_key(SlotId block) {
  Block& b = blocks_[block];
  if (b.keys == kOwnKey) several_[block] = {block};
  b.keys = kSeveral;
  std::uint32_t key = 0;
  if (spare_.empty()) {
    key = static_cast<std::uint32_t>(num_blocks_ + more_keys_.size());
    more_keys_.emplace_back();
  } else {
    key = spare_.back();
    spare_.pop_back();
  }
  several_[block].push_back(key);
  return key;
}

std::span<const std::uint32_t> GroupPool::keys_of(SlotId block, std::uint32_t& own) const {
  if (blocks_[block].keys == kNoKey) return {};
  if (blocks_[block].keys == kSeveral) return several_.at(block);
  own = block;
  return {&own, 1};
}

void GroupPool::add_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t end, bool fresh) {
  UNDERSTUDY_ASSERT(blocks_[block].references > 0 && end > 0, "only referenced blocks get keys");
  if (fresh) fresh_.insert(index_key(content, group));
  set_key(block, content, group, end, schedule_);
  ++num_keys_;
  ++registrations_;
}

// Give the block a key, the latest among equal ones.
void GroupPool::set_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t end,
                        std::uint32_t schedule) {
  const std::uint32_t tag = tag_of(content, group);
  const bool first = blocks_[block].keys == kNoKey;
  if (first) blocks_[block] = {blocks_[block].references, kOwnKey, tag};
  const std::uint32_t key = first ? block : another_key(block);
  const std::uint32_t earliest = index_.find_or_insert(
      tag, key, [&](std::uint32_t other) { return at(other).content == content && at(other).group == group; },
      [this](std::uint32_t other) { return tag_of(other); });
  std::uint32_t last = key;
  if (earliest != kNone) {
    last = std::exchange(at(earliest).previous_equal, key);
    at(last).next_equal = key;
  }
  at(key) = {content, block, end, kNone, last, schedule, group};
}

void GroupPool::drop(std::uint32_t key) {
  if (records_) {
    // Keys that are dropped one after another are one event per group.
    if (events_.empty() || events_.back().stored || events_.back().group != at(key).group) {
      events_.emplace_back().group = at(key).group;
    }
    events_.back().hashes.push_back(at(key).content);
  }
  remove_equal(key, tag_of(key));
  if (key >= num_blocks_) spare_.push_back(key);
  --num_keys_;
}

template <typename Drops>
void GroupPool::drop_if(SlotId block, Drops drops) {
  if (blocks_[block].keys == kNoKey) return;
  if (blocks_[block].keys == kOwnKey) {
    if (!drops(at(block))) return;
    drop(block);
    blocks_[block].keys = kNoKey;
    return;
  }
  std::vector<std::uint32_t>& keys = several_.at(block);
  std::erase_if(keys, [&](std::uint32_t key) {
    if (!drops(at(key))) return false;
    drop(key);
    return true;
  });
  if (!keys.empty()) return;
  several_.erase(block);
  blocks_[block].keys = kNoKey;
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
  UNDERSTUDY_ASSERT(blocks_[to].keys == kNoKey, "a block that takes over keys has none");
  std::uint32_t own = kNone;
  const std::span<const std::uint32_t> keys = keys_of(from, own);
  for (const std::uint32_t key : std::vector<std::uint32_t>(keys.begin(), keys.end())) {
    const Key moved = at(key);
    remove_equal(key, tag_of(key));
    if (key >= num_blocks_) spare_.push_back(key);
    fresh_.insert(index_key(moved.content, moved.group));
    set_key(to, moved.content, moved.group, moved.end, moved.schedule);
  }
  several_.erase(from);
  blocks_[from].keys = kNoKey;
}

bool GroupPool::has_key(SlotId block, std::uint32_t end) const {
  std::uint32_t own = kNone;
  return std::ranges::any_of(keys_of(block, own), [&](std::uint32_t key) { return at(key).end == end; });
}

std::uint32_t GroupPool::longest_key(SlotId block) const {
  std::uint32_t end = 0;
  std::uint32_t own = kNone;
  for (const std::uint32_t key : keys_of(block, own)) end = std::max(end, at(key).end);
  return end;
}

bool GroupPool::is_fresh(SlotId block) const {
  std::uint32_t own = kNone;
  return std::ranges::any_of(keys_of(block, own), [&](std::uint32_t key) {
    return fresh_.contains(index_key(at(key).content, at(key).group));
  });
}

void GroupPool::remove_equal(std::uint32_t key, std::uint32_t tag) {
  const Key& removed = at(key);
  const std::uint32_t next = removed.next_equal;
  const std::uint32_t previous = removed.previous_equal;
  if (index_.replace(tag, key, next)) {
    if (next != kNone) at(next).previous_equal = previous;
    return;
  }
  at(previous).next_equal = next;
  const std::uint32_t after = next != kNone ? next : find_key(removed.content, removed.group);
  UNDERSTUDY_ASSERT(after != kNone, "the key is in the index");
  at(after).previous_equal = previous;
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
  for (SlotId block = 0; block < num_blocks_; ++block) {
    const Block& b = blocks_[block];
    counted += b.references;
    if (b.references > 0) continue;
    require(b.keys != kNoKey, "block ", block, " has neither references nor a key");
    require(queued_at(b.place).block == block, "block ", block, " is cached and is not queued");
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
    require((block.keys == kNoKey) == empty, "block ", listed[i], " is listed at the wrong end of the free list");
  }
  check_keys();
}

void GroupPool::check_keys() const {
  const auto require = [](bool holds, const auto&... what) {
    if (!holds) throw Error(ErrorKind::InvariantViolated, what...);
  };
  std::size_t keys = 0;
  std::uint32_t own = kNone;
  for (SlotId block = 0; block < num_blocks_; ++block) {
    const Block& b = blocks_[block];
    require((b.keys == kSeveral) == several_.contains(block), "block ", block, " has a list of keys, or lacks one");
    for (const std::uint32_t key : keys_of(block, own)) {
      require(at(key).block == block, "key ", key, " of block ", block, " names block ", at(key).block);
      const std::uint32_t first = find_key(at(key).content, at(key).group);
      require(first != kNone, "key ", key, " of block ", block, " is not indexed");
      ++keys;
    }
    if (b.keys != kOwnKey) continue;
    const std::uint32_t tag = b.references > 0 ? b.place : queued_at(b.place).tag;
    require(tag == tag_of(block), "block ", block, " has a tag of another key");
  }
  require(keys == num_keys_, "blocks have ", keys, " keys, ", num_keys_, " are counted");
  require(more_keys_.size() - spare_.size() <= keys, spare_.size(), " keys are unused, of ", more_keys_.size());
  std::size_t indexed = 0;
  index_.for_each([&](std::uint32_t first) {
    require(find_key(at(first).content, at(first).group) == first, "key ", first, " is indexed where it is not found");
    std::uint32_t last = first;
    for (std::uint32_t key = first; key != kNone; last = key, key = at(key).next_equal, ++indexed) {
      require(std::ranges::count(keys_of(at(key).block, own), key) == 1, "key ", key, " is indexed, and block ",
              at(key).block, " does not have it");
      require(at(key).content == at(first).content && at(key).group == at(first).group, "key ", key,
              " is indexed as key ", first);
      require(key == first || at(key).previous_equal == last, "key ", key, " follows another one than key ", last);
    }
    require(at(first).previous_equal == last, "key ", last, " is not listed as the last one of key ", first);
  });
  require(indexed == num_keys_, indexed, " keys are indexed, of ", num_keys_);
}

}  // namespace understudy
