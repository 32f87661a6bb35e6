// Unlimited caches: the most that any cache can hit with requests in one order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "curves/block_visits.hpp"

namespace understudy {

// Hit tokens of each of `rows`, in their order. A request hits the leading blocks that an earlier request with the same
// number in `caches` held (empty: all share one cache). With `loads_last` it may also read a last block that its prompt
// fills, and computes one token of it. Throws InvalidArgument for another count of caches.
std::vector<std::int64_t> unlimited_hits(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                         std::span<const std::int32_t> caches, bool loads_last);

}  // namespace understudy
