#include "curves/optimal.hpp"

namespace understudy {

std::vector<std::uint32_t> next_uses(const BlockVisits& visits, std::span<const std::int64_t> rows) {
  std::vector<std::uint32_t> next(visits.visits_of(rows));
  std::vector<std::uint32_t> following(visits.distinct(), kNoUse);
  std::size_t at = next.size();
  for (std::size_t order = rows.size(); order > 0; --order) {
    const auto row = static_cast<std::size_t>(rows[order - 1]);
    const std::span<const std::uint32_t> blocks = visits.blocks_of(row);
    for (std::size_t i = blocks.size(); i > 0; --i) {
      std::uint32_t& use = following[blocks[i - 1]];
      next[--at] = use;
      if (i <= visits.readable(row)) use = static_cast<std::uint32_t>(at);
    }
  }
  return next;
}

// A cached block is represented by its next use, so the number of a visit says whether the visit hits, and the largest
// number is the block to evict: latest use, and the deeper block of one request.
std::int64_t optimal_hit_tokens(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                std::span<const std::uint32_t> next, std::size_t warm_up, std::uint64_t size) {
  NumberSet cached(next.size());
  std::uint64_t count = 0;
  std::uint64_t hits = 0;
  std::uint32_t at = 0;
  for (std::size_t order = 0; order < rows.size(); ++order) {
    const auto row = static_cast<std::size_t>(rows[order]);
    const std::size_t held = visits.blocks_of(row).size();
    const std::size_t readable = visits.readable(row);
    std::size_t found = 0;
    for (std::size_t i = 0; i < held; ++i, ++at) {
      if (i < readable && cached.contains(at)) {
        found += found == i;
        cached.erase(at);
        --count;
      }
      if (next[at] == kNoUse || cached.contains(next[at])) continue;
      if (count == size) {
        if (count == 0 || cached.largest() < next[at]) continue;
        cached.erase(cached.largest());
        --count;
      }
      cached.insert(next[at]);
      ++count;
    }
    if (order >= warm_up) hits += visits.tokens_in(row, found);
  }
  return static_cast<std::int64_t>(hits);
}

}  // namespace understudy
