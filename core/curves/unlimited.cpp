#include "curves/unlimited.hpp"

#include <algorithm>
#include <numeric>

#include "base/errors.hpp"

namespace understudy {

std::vector<std::int64_t> unlimited_hits(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                         std::span<const std::int32_t> caches, bool loads_last) {
  if (!caches.empty() && caches.size() != rows.size()) {
    throw Error(ErrorKind::InvalidArgument, "caches has ", caches.size(), " entries for ", rows.size(), " rows");
  }
  std::vector<std::size_t> orders(rows.size());
  std::iota(orders.begin(), orders.end(), std::size_t{0});
  // One cache after the other, so that a block needs one mark.
  if (!caches.empty()) {
    std::stable_sort(orders.begin(), orders.end(), [&](std::size_t a, std::size_t b) { return caches[a] < caches[b]; });
  }
  std::vector<std::int64_t> hits(rows.size());
  std::vector<std::uint32_t> holder(visits.distinct());  // number of the last cache with the block, from 1
  std::uint32_t cache = 1;
  for (std::size_t at = 0; at < orders.size(); ++at) {
    const std::size_t order = orders[at];
    if (at > 0 && !caches.empty() && caches[order] != caches[orders[at - 1]]) ++cache;
    const auto row = static_cast<std::size_t>(rows[order]);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    const std::uint64_t prompt = visits.prompt_tokens(row);
    const std::size_t readable = loads_last ? prompt / visits.block_size() : visits.readable(row);
    std::size_t found = 0;
    while (found < readable && holder[blocks[found]] == cache) ++found;
    const std::uint64_t tokens = visits.tokens_in(row, found);
    hits[order] = static_cast<std::int64_t>(loads_last ? std::min(tokens, prompt - 1) : tokens);
    for (const std::uint32_t block : blocks) holder[block] = cache;
  }
  return hits;
}

}  // namespace understudy
