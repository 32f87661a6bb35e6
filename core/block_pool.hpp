// One tier of a store: its slots, their order, and its numbers. Private to the store.
#pragma once

#include <array>
#include <mutex>

#include "block_store.hpp"
#include "eviction/advised.hpp"

namespace understudy {

struct BlockStore::Pool {
  Pool(const PoolConfig& pool_config, std::uint8_t pool_index, SlotId first_slot)
      : config(pool_config),
        index(pool_index),
        first(first_slot),
        count(static_cast<std::uint32_t>(pool_config.num_blocks)) {}

  std::uint64_t available() const noexcept { return in(SlotState::Reset) + in(SlotState::Inactive); }
  std::uint64_t in(SlotState state) const noexcept { return in_state[static_cast<std::size_t>(state)]; }
  void move(Slot& slot, SlotState to) noexcept {
    --in_state[static_cast<std::size_t>(slot.state)];
    ++in_state[static_cast<std::size_t>(to)];
    slot.state = to;
  }
  // The books for `blocks` slots whose state has been set.
  void moved(std::uint64_t blocks, SlotState from, SlotState to) noexcept {
    in_state[static_cast<std::size_t>(from)] -= blocks;
    in_state[static_cast<std::size_t>(to)] += blocks;
  }

  PoolConfig config;
  std::uint8_t index;
  SlotId first;  // its slots are [first, first + count) of the store's
  std::uint32_t count;
  std::unique_ptr<EvictionPolicy> policy;
  AdvisedOrder* advised = nullptr;  // `policy`, when it is one
  std::mutex advisor_mutex;         // one thread at a time asks the advisor; taken before the store's lock
  std::array<std::uint64_t, 6> in_state{};
  std::uint64_t references = 0;  // to registered blocks
  PoolMetrics counters;
};

inline SlotId BlockStore::global(const Pool& pool, SlotId id) const {
  if (id >= pool.count) refuse_unknown(pool, id);
  return pool.first + id;
}

}  // namespace understudy
