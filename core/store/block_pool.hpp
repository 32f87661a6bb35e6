// One tier of a store: its slots, their eviction order and its counters. Private to the store.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/assert.hpp"
#include "eviction/advised.hpp"
#include "store/block_index.hpp"
#include "store/block_store.hpp"

namespace understudy {

struct BlockStore::Pool {
  static constexpr std::size_t kFirstRoom = 256;
  static constexpr std::size_t kFewPlaces = 16384;
  static constexpr std::size_t kPopulated = 1024;  // slots that get memory at once

  Pool(const PoolConfig& pool_config, Slot* slots, SlotId first_slot)
      : config(pool_config),
        first(first_slot),
        count(static_cast<std::uint32_t>(pool_config.num_blocks)),
        buckets(BlockIndex::num_buckets(0)),
        map(slots, buckets.get(), buckets.size()) {}

  std::uint64_t available() const noexcept { return in(SlotState::Reset) + in(SlotState::Inactive); }
  std::uint64_t in(SlotState state) const noexcept { return in_state[static_cast<std::size_t>(state)]; }
  void move(Slot& slot, SlotState to) noexcept {
    UNDERSTUDY_ASSERT(in(slot.state) > 0, "moves a slot out of a state that no slot has");
    --in_state[static_cast<std::size_t>(slot.state)];
    ++in_state[static_cast<std::size_t>(to)];
    slot.state = to;
  }
  // Counts `blocks` slots whose state has been set.
  void moved(std::uint64_t blocks, SlotState from, SlotState to) noexcept {
    UNDERSTUDY_ASSERT(in(from) >= blocks, "moves more slots out of a state than have it");
    in_state[static_cast<std::size_t>(from)] -= blocks;
    in_state[static_cast<std::size_t>(to)] += blocks;
    UNDERSTUDY_ASSERT(std::accumulate(in_state.begin(), in_state.end(), std::uint64_t{0}) == count,
                      "blocks are not conserved");
  }

  // Number of slots that were ever handed out: the first ones.
  std::size_t used() const noexcept { return count - policy->fresh(); }
  SlotId used_end() const noexcept { return first + static_cast<SlotId>(used()); }
  // Prepares index, order and memory for taking `blocks` more slots.
  void make_room(std::size_t blocks, HugeArray<Slot>& slots) {
    const std::size_t needed = used() + std::min(blocks, policy->fresh());
    if (needed > room) grow(needed);
    if (needed <= populated || advised != nullptr) return;  // a user-defined policy takes slots in any order
    const std::size_t more = std::min<std::size_t>(count, std::max(needed, populated + kPopulated));
    slots.populate(first + populated, first + more);
    // A pool that is mostly used saves address translation in huge pages.
    if (2 * populated < count && 2 * more >= count) {
      slots.move_to_huge_pages(first, first + count);
      buckets.move_to_huge_pages(0, buckets.size());
    }
    populated = more;
  }
  void grow(std::size_t needed) {
    // Small pools grow fast: moving costs more than the places that may stay empty.
    const std::size_t more = room < kFewPlaces ? 4 * room : 2 * room;
    const std::size_t slots = std::min<std::size_t>(count, std::max({needed, more, kFirstRoom}));
    using Buckets = HugeArray<BlockIndex::Bucket>;
    Buckets larger(BlockIndex::num_buckets(slots),
                   advised == nullptr ? Buckets::Writes::Dense : Buckets::Writes::Sparse);
    larger.prefer_huge_pages(0, larger.size());                 // at that length at least half of a huge page is used
    if (advised == nullptr) larger.populate(0, larger.size());  // else there may be far more places than blocks
    policy->grow(slots);
    map.move_to(larger.get(), larger.size());
    buckets = std::move(larger);
    room = slots;
  }

  // Counts `blocks` that were available, `evictions` of them cached.
  void handed_out(std::uint64_t blocks, std::uint64_t evictions, SlotState to) noexcept {
    UNDERSTUDY_ASSERT(evictions <= blocks, "evicts more blocks than it hands out");
    moved(evictions, SlotState::Inactive, to);
    moved(blocks - evictions, SlotState::Reset, to);
    counters.allocations += blocks;
    counters.evictions += evictions;
    counters.allocations_from_reset += blocks - evictions;
  }

  PoolConfig config;
  SlotId first;  // slots [first, first + count) of the store
  std::uint32_t count;
  std::size_t populated = 0;  // leading slots that have memory
  std::size_t room = 0;       // slots that `buckets` and `policy` have room for
  HugeArray<BlockIndex::Bucket> buckets;
  BlockIndex map;  // over `buckets`
  std::unique_ptr<EvictionPolicy> policy;
  AdvisedOrder* advised = nullptr;  // `policy`, if it is advised
  std::mutex advisor_mutex;         // one thread at a time calls the advisor; locked before the store
  std::array<std::uint64_t, 7> in_state{};
  bool contested = false;        // blocks were registered while others were claimed, perhaps with equal hashes
  std::uint64_t references = 0;  // to registered blocks
  PoolMetrics counters;
};

inline SlotId BlockStore::global(const Pool& pool, SlotId id) const {
  if (id >= pool.count) refuse_unknown(pool, id);
  return pool.first + id;
}

inline void BlockStore::warm_slot(const Pool& pool, SlotId id) const noexcept {
  if (id < pool.count) slots_[pool.first + id].warm();
}

inline void BlockStore::set_identity(const Pool& pool, SlotId id, const BlockIdentity& identity) noexcept {
  slots_[id].lineage = identity.lineage;
  if (!pool.config.keeps_details) return;
  details_[id].local_hash = identity.local_hash;
  details_[id].parent_hash = identity.parent_hash;
}

// True if no event, detail or sketch needs more than the slots themselves.
inline bool BlockStore::is_quiet(const Pool& pool) const noexcept {
  return !pool.config.keeps_details && !sketch_ && !events_on_;
}

[[gnu::always_inline]] inline void BlockStore::publish_removed(const Pool& pool, SlotId id, bool last) {
  if (pool.config.keeps_details) {
    events_.removed(identity(id), details_[id].generation, pool.config.tier, last);
  } else {
    events_.removed({slots_[id].lineage, 0, 0}, 0, pool.config.tier, last);
  }
}

[[gnu::always_inline]] inline void BlockStore::publish_stored(const Pool& pool, SlotId id, bool first,
                                                              const Token* tokens) {
  if (pool.config.keeps_details) {
    events_.stored(identity(id), details_[id].generation, pool.config.tier, first, tokens);
  } else {
    events_.stored({slots_[id].lineage, 0, 0}, 0, pool.config.tier, first, tokens);
  }
}

// Registers the only copy of a block on its tier.
[[gnu::always_inline]] inline void BlockStore::note_registered(Pool& pool, SlotId id, const Token* tokens) {
  Slot& slot = slots_[id];
  UNDERSTUDY_ASSERT(slot.state == SlotState::Staged && slot.refs == 1, "registers a slot that is not staged");
  slot.state = SlotState::Primary;
  const std::uint64_t generation = next_generation_++;
  if (pool.config.keeps_details) details_[id].generation = generation;
  if (sketch_ && !present_elsewhere(pool, slot.lineage)) sketch_->touch(slot.lineage);
  if (events_on_) publish_stored(pool, id, true, tokens);
}

template <typename LineageOf>
std::span<const Token> BlockStore::copied_tokens(std::size_t blocks, LineageOf lineage_of) {
  copied_.clear();
  if (!emits_token_ids()) return copied_;
  for (std::size_t i = 0; i < blocks; ++i) {
    const Token* const known = find_tokens(lineage_of(i));
    if (known == nullptr) {
      throw Error(ErrorKind::InvalidArgument, "token_ids must hold ", blocks * block_size_, " tokens for ", blocks,
                  " blocks of ", block_size_, ", got none, and no tier has block ", i, " of them");
    }
    copied_.insert(copied_.end(), known, known + block_size_);
  }
  return copied_;
}

inline bool BlockStore::forget(Pool& pool, SlotId id, std::uint32_t tag, bool announce) {
  const bool last = !slots_[id].twinned;
  if (last) {
    pool.map.erase(tag, id);
  } else {
    leave_twins(pool, id, tag);
  }
  if (announce && events_on_ && (last || pool.config.duplicates == DuplicatePolicy::Keep)) {
    publish_removed(pool, id, last);
  }
  return last;
}

}  // namespace understudy
