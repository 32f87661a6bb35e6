#include "engine/vllm/groups/group_pool.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/assert.hpp"

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
    for (std::size_t i = 0; i < size; ++i) index_.touch_place(batch[i].place);
    for (std::size_t i = 0; i < size; ++i) {
      const auto [block, place] = batch[i];
      if (!records_ && place != kNone && index_.erase_simple(place, block)) {
        blocks_[block] = {1, kNoKey, 0};
        --num_keys_;
      } else {
        dequeue(batch[i]);
        drop_keys(block);
      }
      cached[taken++] = block;
    }
  }
}

bool GroupPool::reference(SlotId block) {
  if (blocks_[block].references > 0) {
    ++blocks_[block].references;
    return false;
  }
  UNDERSTUDY_ASSERT(blocks_[block].keys != kNoKey, "only cached blocks are found while they are free");
  Queued& queued = queued_at(blocks_[block].place);
  dequeue(queued);
  queued.block = kNoSlot;
  --num_cached_;
  return true;
}

// Give a cached block a reference, and its place in the index in exchange for that in the queue.
void GroupPool::dequeue(Queued cached) {
  blocks_[cached.block].references = 1;
  blocks_[cached.block].place = cached.place;
}

std::size_t GroupPool::release(std::span<const SlotId> blocks) {
  std::size_t cached = 0;
  for (std::size_t first = 0; first < blocks.size(); first += kBatch) {
    const std::span<const SlotId> batch = blocks.subspan(first, std::min(kBatch, blocks.size() - first));
    if (queue_end_ - queue_first_ + batch.size() > queue_.size()) compact_queue();
    for (const SlotId block : batch) touch_block(block);
    std::uint32_t end = queue_end_;
    for (const SlotId block : batch) {
      const Block b = blocks_[block];
      UNDERSTUDY_ASSERT(b.references > 0, "only referenced blocks are released");
      if (b.references > 1) {
        --blocks_[block].references;
      } else if (b.keys == kNoKey) {
        released_.push_back(block);
      } else {
        queued_at(end) = {block, b.keys == kOwnKey ? b.place : kNone};
        blocks_[block] = {0, b.keys, end++};
      }
    }
    cached += end - queue_end_;
    queue_end_ = end;
  }
  num_cached_ += cached;
  const std::size_t freed = cached + released_.size();
  empty_.insert(empty_.end(), released_.rbegin(), released_.rend());
  released_.clear();
  return freed;
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
    const Queued cached = queued_at(queue_first_);
    if (cached.block == kNoSlot) continue;
    dequeue(cached);
    drop_keys(cached.block);
    released_.push_back(cached.block);
  }
  empty_.insert(empty_.begin(), released_.rbegin(), released_.rend());
  released_.clear();
  num_cached_ = 0;
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

SlotId GroupPool::find(const GroupKey& key) const {
  const KeyIndex::Entry found =
      index_.find(hash_of(key), [&](std::uint32_t other) { return is_equal(other, key.content, key.group); });
  return found.place == kNone ? kNoSlot : block_of(found.value);
}

std::uint32_t GroupPool::another_key(SlotId block) {
  Block& b = blocks_[block];
  if (b.keys == kOwnKey) several_[block] = {{block, b.place}};
  b.keys = kSeveral;
  std::uint32_t key = 0;
  if (spare_.empty()) {
    key = static_cast<std::uint32_t>(num_blocks_ + more_keys_.size());
    more_keys_.emplace_back();
  } else {
    key = spare_.back();
    spare_.pop_back();
  }
  more_keys_[key - num_blocks_].block = block;
  several_[block].push_back({key, kNone});
  return key;
}

std::span<const GroupPool::Placed> GroupPool::keys_of(SlotId block, Placed& own) const {
  const Block& b = blocks_[block];
  if (b.keys == kNoKey) return {};
  if (b.keys == kSeveral) return several_.at(block);
  own = {block, b.references > 0 ? b.place : queued_at(b.place).place};
  return {&own, 1};
}

// Give the block a key, the latest among equal ones.
void GroupPool::set_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t home, std::uint32_t end,
                        std::uint32_t schedule) {
  const bool first = blocks_[block].keys == kNoKey;
  const std::uint32_t number = first ? block : another_key(block);
  const auto [place, earliest] = index_.find_or_insert(
      {home, own_hash(content, group)}, number, [&](std::uint32_t other) { return is_equal(other, content, group); });
  if (first) {
    blocks_[block] = {blocks_[block].references, kOwnKey, place};
  } else {
    several_[block].back().place = place;
  }
  at(number) = {content, end, home, kNone, last_equal(earliest, number), schedule, group};
}

// Append a key to those that equal the earliest one (kNone: none); return the last one before it, or the key itself.
std::uint32_t GroupPool::last_equal(std::uint32_t earliest, std::uint32_t key) {
  if (earliest == kNone) return key;
  const std::uint32_t last = std::exchange(at(earliest).previous_equal, key);
  at(last).next_equal = key;
  return last;
}

void GroupPool::add_keys(std::span<const SlotId> blocks, std::span<const std::uint64_t> contents,
                         const Neighbours& neighbours) {
  if (index_.is_full(blocks.size())) grow_index();
  const std::uint8_t group = neighbours.group;
  const std::uint32_t home = home_hash(neighbours.near, group);
  const bool unused = blocks.size() <= KeyIndex::kLanes && index_.is_unused(home);
  std::uint32_t end = neighbours.end;
  for (std::uint32_t i = 0; i < blocks.size(); ++i, end += neighbours.step) {
    const SlotId block = blocks[i];
    const std::uint64_t content = contents[i];
    UNDERSTUDY_ASSERT(blocks_[block].references > 0 && end > 0, "only referenced blocks get keys");
    if (neighbours.fresh) fresh_.insert(index_key(content, group));
    if (blocks_[block].keys != kNoKey) drop_shorter(block, end);
    if (!unused || blocks_[block].keys != kNoKey) {
      set_key(block, content, group, home, end, schedule_);
      continue;
    }
    const std::uint32_t place = index_.add({home, own_hash(content, group)}, i, block);
    blocks_[block] = {blocks_[block].references, kOwnKey, place};
    keys_[block] = {content, end, home, kNone, block, schedule_, group};
  }
  num_keys_ += blocks.size();
  registrations_ += blocks.size();
}

void GroupPool::grow_index() {
  index_.grow([this](std::uint32_t key) { return hash_of(key); },
              [this](std::uint32_t first, std::uint32_t place) {
                for (std::uint32_t key = first; key != kNone; key = at(key).next_equal) place_of(key) = place;
              });
}

std::uint32_t& GroupPool::place_of(std::uint32_t key) {
  const SlotId block = block_of(key);
  Block& b = blocks_[block];
  if (b.keys == kOwnKey) return b.references > 0 ? b.place : queued_at(b.place).place;
  return std::ranges::find(several_.at(block), key, &Placed::key)->place;
}

void GroupPool::drop(Placed key) {
  const Key& dropped = at(key.key);
  if (records_) {
    // Keys that are dropped one after another are one event per group.
    if (events_.empty() || events_.back().stored || events_.back().group != dropped.group) {
      events_.emplace_back().group = dropped.group;
    }
    events_.back().hashes.push_back(dropped.content);
  }
  unlink(key);
  if (key.key >= num_blocks_) spare_.push_back(key.key);
  --num_keys_;
}

template <typename Drops>
void GroupPool::drop_if(SlotId block, Drops drops) {
  UNDERSTUDY_ASSERT(blocks_[block].references > 0, "only referenced blocks lose single keys");
  if (blocks_[block].keys == kNoKey) return;
  if (blocks_[block].keys == kOwnKey) {
    if (!drops(at(block))) return;
    drop({block, blocks_[block].place});
    blocks_[block].keys = kNoKey;
    return;
  }
  std::vector<Placed>& keys = several_.at(block);
  std::erase_if(keys, [&](Placed key) {
    if (!drops(at(key.key))) return false;
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
  if (index_.is_full(0)) grow_index();  // not later: the places would change
  Placed own;
  const std::span<const Placed> keys = keys_of(from, own);
  for (const Placed key : std::vector<Placed>(keys.begin(), keys.end())) {
    const Key moved = at(key.key);
    unlink(key);
    if (key.key >= num_blocks_) spare_.push_back(key.key);
    fresh_.insert(index_key(moved.content, moved.group));
    set_key(to, moved.content, moved.group, moved.home, moved.end, moved.schedule);
  }
  several_.erase(from);
  blocks_[from].keys = kNoKey;
}

bool GroupPool::has_key(SlotId block, std::uint32_t end) const {
  Placed own;
  return std::ranges::any_of(keys_of(block, own), [&](Placed key) { return at(key.key).end == end; });
}

std::uint32_t GroupPool::longest_key(SlotId block) const {
  std::uint32_t end = 0;
  Placed own;
  for (const Placed key : keys_of(block, own)) end = std::max(end, at(key.key).end);
  return end;
}

bool GroupPool::is_fresh(SlotId block) const {
  Placed own;
  return std::ranges::any_of(keys_of(block, own), [&](Placed key) {
    return fresh_.contains(index_key(at(key.key).content, at(key.key).group));
  });
}

// Take a key from among its equals, and from the index if it was the only one.
void GroupPool::unlink(Placed key) {
  const std::uint32_t next = at(key.key).next_equal;
  const std::uint32_t previous = at(key.key).previous_equal;
  const std::uint32_t first = index_.value_at(key.place);
  if (first == key.key) {
    if (next == kNone) return index_.erase(key.place, [this](std::uint32_t erased) { return hash_of(erased); });
    index_.replace(key.place, next);
    at(next).previous_equal = previous;
    return;
  }
  at(previous).next_equal = next;
  at(next != kNone ? next : first).previous_equal = previous;
}

std::vector<std::uint64_t> GroupPool::contents() const {
  std::vector<std::uint64_t> out;
  out.reserve(index_.size());
  index_.for_each([&](std::uint32_t key) { out.push_back(index_key(at(key).content, at(key).group)); });
  return out;
}

}  // namespace understudy
