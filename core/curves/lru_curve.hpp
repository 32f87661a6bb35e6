// LRU caches of every size in one pass, and the blocks that one of them computes again.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "curves/block_visits.hpp"

namespace understudy {

struct LruCurve {
  std::vector<std::int64_t> hit_tokens;  // by cache size in blocks, from 0; larger caches hit as many as the last
  std::int64_t distinct_blocks = 0;      // blocks of an unlimited cache at the end
};

// Serves `rows` one after the other; the first `warm_up` of them are not counted. A request releases its blocks last
// first, so a prefix outlives what follows it, and a cache of C blocks holds the C blocks that were released last.
LruCurve lru_curve(const BlockVisits& visits, std::span<const std::int64_t> rows, std::size_t warm_up);

// Counts, for each block number, how often an LRU cache of `size` blocks had evicted it when a request read it.
std::vector<std::uint32_t> lru_recomputed(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                          std::uint64_t size);

}  // namespace understudy
