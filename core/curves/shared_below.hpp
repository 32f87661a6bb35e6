// LRU caches of workers above one LRU cache that all of them share.
#pragma once

#include <cstdint>
#include <span>

#include "curves/block_visits.hpp"

namespace understudy {

enum class BelowRule : std::uint8_t {
  Moves,   // it stores the blocks that a worker evicts, and a block that is read moves up
  Copies,  // it stores every block that a worker holds, and keeps a block that is read
};

// Hit tokens of `rows`, of which row i is served by worker caches[i], after the first `warm_up`. Each worker has `own`
// blocks and all share `below` more. Throws InvalidArgument for another count of caches, or a negative one.
std::int64_t shared_below_hits(const BlockVisits& visits, std::span<const std::int64_t> rows,
                               std::span<const std::int32_t> caches, std::size_t warm_up, std::uint64_t own,
                               std::uint64_t below, BelowRule rule);

}  // namespace understudy
