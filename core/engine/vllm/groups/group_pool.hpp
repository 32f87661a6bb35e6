// Blocks that all KV cache groups share: one free list, and an index of keys by content and group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/huge_array.hpp"
#include "engine/vllm/groups/key_index.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A change of keys, for KV events.
struct GroupEvent {
  bool stored = false;
  std::uint8_t group = 0;
  bool has_parent = false;
  std::uint32_t block_size = 0;  // tokens of each named block
  std::uint32_t position = 0;    // first token of the range
  std::uint32_t length = 0;      // tokens of the range, those of unnamed blocks included
  std::uint64_t parent = 0;
  std::uint64_t request = 0;
  std::vector<std::uint64_t> hashes;  // of named blocks
  std::vector<std::uint32_t> ends;    // where they end, in tokens
  std::vector<BlockIdentity> units;   // all units of hashing in the range
};

// Names a key. `near` is a hash that keys of neighbouring blocks have in common: the index keeps them together.
struct GroupKey {
  std::uint64_t content;
  std::uint64_t near;
  std::uint8_t group;

  static GroupKey without_neighbours(std::uint64_t content, std::size_t group) noexcept {
    return {content, content, static_cast<std::uint8_t>(group)};
  }
};

// A block is free while no request references it; free blocks with a key are cached. A block may have several keys, and
// several blocks may have equal keys.
class GroupPool {
 public:
  GroupPool(std::size_t num_blocks, bool events);

  // ── Blocks ──
  std::size_t num_blocks() const noexcept { return num_blocks_; }
  std::size_t num_free() const noexcept { return empty_.size() + num_cached_; }
  std::size_t num_cached() const noexcept { return num_cached_; }  // free ones with a key
  std::uint32_t references(SlotId block) const noexcept { return blocks_[block].references; }
  // Cached blocks that are evicted before a cached one, or fewer.
  std::uint64_t cached_before(SlotId block) const noexcept {
    const std::uint64_t holes = (queue_end_ - queue_first_) - num_cached_;
    const std::uint64_t places = blocks_[block].place - queue_first_;
    return places - std::min(places, holes);
  }
  // The first free blocks, of which there are enough; their keys are dropped.
  void take(std::span<SlotId> out);
  SlotId take() {
    SlotId block = kNoSlot;
    take({&block, 1});
    return block;
  }
  // Returns whether it had no reference before.
  bool reference(SlotId block);
  // One reference each, in order: blocks that come free and have a key go to the end of the free list, the others to
  // its front. Returns the number of those that come free.
  std::size_t release(std::span<const SlotId> blocks);
  // The same for blocks with one reference and no key, the last one first.
  void release_empty(std::span<const SlotId> blocks);
  // The first `count` free blocks.
  std::vector<SlotId> free_head(std::size_t count) const;
  void drop_all_cached();

  // ── Keys ──
  // The earliest block with that key; kNoSlot: none.
  SlotId find(const GroupKey& key) const;
  // Read what `find` and `add_key` need ahead of their use, each for several keys in a loop of its own: the place in
  // the index, then the key there or the block.
  void touch_place(const GroupKey& key) const { index_.touch(home_hash(key.near, key.group)); }
  void touch_found(const GroupKey& key) const {
    const std::uint32_t found = index_.guess(hash_of(key));
    if (found >= num_blocks_) return;
    static_cast<void>(*static_cast<const volatile std::uint32_t*>(&keys_[found].end));
    touch_block(found);
  }
  void touch_block(SlotId block) const {
    static_cast<void>(*static_cast<const volatile std::uint32_t*>(&blocks_[block].place));
  }
  // Give blocks the keys of these contents, which are neighbours. Shorter keys of the blocks are dropped.
  struct Neighbours {
    std::uint64_t near;
    std::uint8_t group;
    bool fresh;
    std::uint32_t end;   // of the first block, in tokens
    std::uint32_t step;  // tokens to the next one's
  };
  void add_keys(std::span<const SlotId> blocks, std::span<const std::uint64_t> contents, const Neighbours& neighbours);
  void add_key(SlotId block, const GroupKey& key, std::uint32_t end, bool fresh) {
    add_keys({&block, 1}, {&key.content, 1}, {key.near, key.group, fresh, end, 0});
  }
  void drop_keys(SlotId block);
  // Drop keys whose content ends before `end`.
  void drop_shorter(SlotId block, std::uint32_t end);
  // Move all keys; they are then the latest among equal ones.
  void move_keys(SlotId from, SlotId to);
  bool has_key(SlotId block, std::uint32_t end) const;
  // Call `visit(content, group, end)` for each key of a block.
  template <typename Visit>
  void each_key(SlotId block, Visit visit) const {
    Placed own;
    for (const auto [key, place] : keys_of(block, own)) visit(at(key).content, at(key).group, at(key).end);
  }
  std::uint32_t longest_key(SlotId block) const;  // its end; 0: no key
  // A state group has registered or moved a key in this schedule that the block has, for this or another block.
  bool is_fresh(SlotId block) const;
  void begin_schedule() {
    ++schedule_;
    fresh_.clear();
  }
  // Drop keys that the block got in this schedule.
  void drop_new(SlotId block);

  std::size_t num_keys() const noexcept { return num_keys_; }
  std::uint64_t evictions() const noexcept { return evictions_; }
  std::uint64_t registrations() const noexcept { return registrations_; }
  std::vector<std::uint64_t> contents() const;  // of all keys, with their group, in no order

  // ── Events ──
  bool records_events() const noexcept { return records_; }
  std::vector<GroupEvent>& events() noexcept { return events_; }

  void check(std::uint64_t references) const;  // InvariantViolated

 private:
  static constexpr std::uint32_t kNone = KeyIndex::kNone;
  static constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15u;
  static constexpr std::size_t kBatch = 32;  // blocks whose data is read ahead

  // The key with the number of its block is the block's own; others come from `more_keys_`.
  struct Key {
    std::uint64_t content;
    std::uint32_t end;   // tokens
    std::uint32_t home;  // hash
    // Equal keys of other blocks, in the order of registration.
    std::uint32_t next_equal;      // kNone: it is the last one
    std::uint32_t previous_equal;  // of the first one: the last one
    std::uint32_t schedule;        // when it was registered
    std::uint8_t group;
  };
  static_assert(sizeof(Key) == 32);
  struct OtherKey {
    Key key;
    SlotId block;
  };
  // A key and its place in the index, which equal keys share.
  struct Placed {
    std::uint32_t key;
    std::uint32_t place;
  };
  enum Keys : std::uint32_t {
    kNoKey,
    kOwnKey,   // its own one alone
    kSeveral,  // those of `several_`
  };
  // Read and written at every step of a block's life; small, because the pool is bound by memory. Its key is then read
  // only by lookups that find it.
  struct Block {
    std::uint32_t references : 30;  // 1 also while it is free without a key, so that handing it out writes nothing
    std::uint32_t keys : 2;
    std::uint32_t place;  // while it is cached: in the queue; else that of its own key, if that is the only one
  };
  static_assert(sizeof(Block) == 8);
  struct Queued {
    SlotId block;         // kNoSlot: referenced again since
    std::uint32_t place;  // of its key in the index; kNone: it has several
  };

  static std::uint64_t index_key(std::uint64_t content, std::uint8_t group) noexcept {
    return content ^ (std::uint64_t{group} * kSpread);
  }
  static std::uint32_t own_hash(std::uint64_t content, std::uint8_t group) noexcept {
    return static_cast<std::uint32_t>((content * kSpread) >> 32) ^ (group * 0x9E37u);
  }
  static std::uint32_t home_hash(std::uint64_t near, std::uint8_t group) noexcept {
    return static_cast<std::uint32_t>(((near + group) * kSpread) >> 32);
  }
  static KeyIndex::Hash hash_of(const GroupKey& key) noexcept {
    return {home_hash(key.near, key.group), own_hash(key.content, key.group)};
  }
  KeyIndex::Hash hash_of(std::uint32_t key) const noexcept {
    return {at(key).home, own_hash(at(key).content, at(key).group)};
  }
  bool is_equal(std::uint32_t key, std::uint64_t content, std::uint8_t group) const noexcept {
    return at(key).content == content && at(key).group == group;
  }
  Key& at(std::uint32_t key) noexcept { return key < num_blocks_ ? keys_[key] : more_keys_[key - num_blocks_].key; }
  const Key& at(std::uint32_t key) const noexcept {
    return key < num_blocks_ ? keys_[key] : more_keys_[key - num_blocks_].key;
  }
  SlotId block_of(std::uint32_t key) const noexcept {
    return key < num_blocks_ ? key : more_keys_[key - num_blocks_].block;
  }
  // A key without contents for a block that has one.
  std::uint32_t another_key(SlotId block);
  void set_key(SlotId block, std::uint64_t content, std::uint8_t group, std::uint32_t home, std::uint32_t end,
               std::uint32_t schedule);
  std::uint32_t last_equal(std::uint32_t earliest, std::uint32_t key);
  void grow_index();
  // Keys of a block in the order of registration.
  std::span<const Placed> keys_of(SlotId block, Placed& own) const;
  std::uint32_t& place_of(std::uint32_t key);
  Queued& queued_at(std::uint32_t place) noexcept { return queue_[place & (queue_.size() - 1)]; }
  const Queued& queued_at(std::uint32_t place) const noexcept { return queue_[place & (queue_.size() - 1)]; }
  void dequeue(Queued cached);
  void compact_queue();
  void unlink(Placed key);
  template <typename Drops>
  void drop_if(SlotId block, Drops drops);
  void drop(Placed key);
  void check_keys() const;

  std::size_t num_blocks_;
  HugeArray<Block> blocks_;
  HugeArray<Key> keys_;               // by block
  std::vector<OtherKey> more_keys_;   // of blocks with several
  std::vector<std::uint32_t> spare_;  // unused among them
  std::unordered_map<SlotId, std::vector<Placed>> several_;
  KeyIndex index_;  // the earliest of equal keys
  // Free blocks without a key precede those with one in the free list, and the latest released is the first.
  std::vector<SlotId> empty_;  // the first one last
  // Cached blocks from the least recently released on, in a ring. It has what an eviction needs of a block, and places
  // of blocks that are referenced again stay in it.
  HugeArray<Queued> queue_;
  std::uint32_t queue_first_ = 0;
  std::uint32_t queue_end_ = 0;
  std::size_t num_cached_ = 0;
  std::size_t num_keys_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t registrations_ = 0;
  std::uint32_t schedule_ = 0;
  std::vector<SlotId> released_;             // scratch of `release`
  std::unordered_set<std::uint64_t> fresh_;  // keys of state groups since the schedule began
  bool records_ = false;
  std::vector<GroupEvent> events_;
};

}  // namespace understudy
