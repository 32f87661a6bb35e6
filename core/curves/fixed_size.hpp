// Caches of one size: FIFO, and caches that keep the blocks of running requests.
#pragma once

#include <cstdint>
#include <span>

#include "curves/block_visits.hpp"
#include "eviction/policy.hpp"

namespace understudy {

// Hit tokens of a FIFO cache: blocks are stored first to last and leave in the order of storing, used again or not.
std::int64_t fifo_hit_tokens(const BlockVisits& visits, std::span<const std::int64_t> rows, std::size_t warm_up,
                             std::uint64_t size);

struct PinnedHits {
  std::int64_t hit_tokens = 0;
  std::int64_t unplaced_blocks = 0;  // blocks that found the cache full of other running requests' blocks
};

// Begins and ends of requests in the order of time: row r begins (r) or ends (~r = -1 - r). The blocks of a running
// request are not evicted. Throws InvalidArgument unless each row begins once and ends once, later.
using RunningOrder = std::span<const std::int64_t>;

// A cache that evicts by one of the pools' policies.
PinnedHits policy_hits(const BlockVisits& visits, RunningOrder order, std::size_t warm_up, std::uint32_t size,
                       PolicyKind kind);

// A cache that evicts the block with the latest next use; a running request holds all its blocks.
PinnedHits pinned_optimal_hits(const BlockVisits& visits, RunningOrder order, std::size_t warm_up, std::uint32_t size);

}  // namespace understudy
