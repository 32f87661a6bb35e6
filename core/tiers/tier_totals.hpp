// Counters of a worker's tiers, and answers to lookups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "slots/slot.hpp"

namespace understudy {

struct TierTotals {
  std::uint64_t offloaded_blocks = 0;  // copies to the host that were started
  std::uint64_t dropped_blocks = 0;    // qualified for the host, which had no room
  std::uint64_t onboards = 0;          // loads that a request (or a prefetch) started
  std::uint64_t onboarded_blocks = 0;  // of loads whose copy to the device was not dropped
  std::uint64_t joined_loads = 0;      // blocks that another request was loading already
  std::uint64_t slow_loads = 0;        // not started: computing was sooner
  std::uint64_t failed_loads = 0;
  std::uint64_t room_waits = 0;       // allocations that waited for copies to leave the device
  std::uint64_t held_block_ns = 0;    // time that slots were held, summed
  std::uint64_t held_max_blocks = 0;  // of one worker, at any time
  // vLLM's native offload:
  std::uint64_t deferred_lookups = 0;  // lookups that had to be repeated in a later step
  std::uint64_t refused_stores = 0;    // offers that the host had no room for
  std::uint64_t flushed_copies = 0;    // copies that a step waited for, because their blocks were reallocated

  TierTotals& operator+=(const TierTotals& other) noexcept {
    offloaded_blocks += other.offloaded_blocks;
    dropped_blocks += other.dropped_blocks;
    onboards += other.onboards;
    onboarded_blocks += other.onboarded_blocks;
    joined_loads += other.joined_loads;
    slow_loads += other.slow_loads;
    failed_loads += other.failed_loads;
    room_waits += other.room_waits;
    held_block_ns += other.held_block_ns;
    held_max_blocks = std::max(held_max_blocks, other.held_max_blocks);
    deferred_lookups += other.deferred_lookups;
    refused_stores += other.refused_stores;
    flushed_copies += other.flushed_copies;
    return *this;
  }
};

// Answer to a lookup of one block: where it is, or when it will be there.
struct TierAnswer {
  enum class Kind : std::uint8_t {
    Miss,
    Hit,
    Pending,  // its last transfer is in flight, and nothing else delays it
    Retry,    // on its way, arrival unknown: ask again next step
  };
  Kind kind = Kind::Miss;
  Tier tier = Tier::G1;
  std::int64_t ready_ns = 0;  // Pending only; exact, if no transfer joins its links
};

}  // namespace understudy
