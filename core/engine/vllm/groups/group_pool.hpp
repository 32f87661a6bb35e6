// Single blocks that all KV cache groups share: one free list, and an index of keys by content and group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/flat_map.hpp"
#include "base/short_list.hpp"
#include "engine/vllm/groups/group_event.hpp"
#include "events/event_ring.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Names a key.
struct GroupKey {
  std::uint64_t content;
  std::uint8_t group;

  std::uint64_t hash() const noexcept { return group_key(content, group); }
};

// A block is free while no request references it; free blocks with a key are cached. A block may have several keys, and
// several blocks may have equal keys.
class GroupPool {
 public:
  GroupPool(std::size_t num_blocks, bool events);

  // ── Blocks ──
  std::size_t num_blocks() const noexcept { return blocks_.size(); }
  std::size_t num_free() const noexcept { return empty_.size() + num_cached_; }
  std::size_t num_cached() const noexcept { return num_cached_; }  // free ones with a key
  std::uint32_t references(SlotId block) const noexcept { return blocks_[block].references; }
  // Cached blocks that are evicted before the first of these, or fewer.
  std::uint64_t cached_before(std::span<const std::vector<SlotId>> hits) const;
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
  // The first `count` free blocks.
  std::vector<SlotId> free_head(std::size_t count) const;
  void drop_all_cached();

  // ── Keys ──
  // The earliest block with that key; kNoSlot: none.
  SlotId find(const GroupKey& key) const;
  // Give a block a key, the latest among equal ones; its shorter keys are dropped.
  void add_key(SlotId block, const GroupKey& key, std::uint32_t end, bool fresh);
  void drop_keys(SlotId block);
  // Drop keys whose content ends before `end`.
  void drop_shorter(SlotId block, std::uint32_t end);
  // Move all keys; they are then the latest among equal ones.
  void move_keys(SlotId from, SlotId to);
  bool has_key(SlotId block, std::uint32_t end) const;
  // Call `visit(content, group, end)` for each key of a block.
  template <typename Visit>
  void each_key(SlotId block, Visit visit) const {
    for (const Key& key : blocks_[block].keys) visit(key.name.content, key.name.group, key.end);
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

  std::uint64_t evictions() const noexcept { return evictions_; }
  std::uint64_t registrations() const noexcept { return registrations_; }
  std::vector<std::uint64_t> contents() const;  // of all keys, with their group, in no order

  // ── Events ──
  bool records_events() const noexcept { return records_; }
  std::vector<GroupEvent>& events() noexcept { return events_; }

  void check(std::uint64_t references) const;  // InvariantViolated

 private:
  struct Key {
    GroupKey name;
    std::uint32_t end;       // tokens
    std::uint32_t schedule;  // when it was registered
  };
  struct Block {
    std::uint32_t references = 0;
    SlotId before = kNoSlot;  // in the queue, while it is cached
    SlotId after = kNoSlot;
    std::vector<Key> keys;  // in the order of registration
  };

  void queue(SlotId block);
  void unqueue(SlotId block);
  void unlink(SlotId block, const GroupKey& name);
  template <typename Drops>
  void drop_if(SlotId block, Drops drops);

  std::vector<Block> blocks_;
  FlatMap<ShortList<SlotId>> index_;  // by hash of the key, in the order of registration
  // Free blocks without a key precede those with one in the free list, and the latest released is the first.
  std::vector<SlotId> empty_;  // the first one last
  SlotId front_ = kNoSlot;     // of the queue of cached blocks: the least recently released
  SlotId back_ = kNoSlot;
  std::size_t num_cached_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t registrations_ = 0;
  std::uint32_t schedule_ = 0;
  std::vector<SlotId> released_;             // scratch of `release`
  std::unordered_set<std::uint64_t> fresh_;  // keys of state groups since the schedule began
  bool records_ = false;
  std::vector<GroupEvent> events_;
};

}  // namespace understudy
