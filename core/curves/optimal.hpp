// Belady's optimal eviction: the next use of each visit, and the bound without pinned blocks.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "curves/block_visits.hpp"

namespace understudy {

inline constexpr std::uint32_t kNoUse = 0xFFFFFFFFu;

// For each visit, in the order of `rows` and first to last within a row: the next visit that may read the block.
std::vector<std::uint32_t> next_uses(const BlockVisits& visits, std::span<const std::int64_t> rows);

// A set of numbers below a limit, with the largest in a few steps: a tree of bits, 64 to a word.
class NumberSet {
 public:
  explicit NumberSet(std::uint64_t limit) {
    do {
      limit = limit / 64 + 1;
      levels_.emplace_back(limit);
    } while (limit > 1);
  }

  bool empty() const noexcept { return levels_.back()[0] == 0; }
  bool contains(std::uint32_t number) const noexcept { return (levels_[0][number / 64] >> (number % 64) & 1) != 0; }
  void insert(std::uint32_t number) noexcept {
    for (std::vector<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[number / 64];
      const bool filled = word != 0;
      word |= std::uint64_t{1} << (number % 64);
      if (filled) return;
      number /= 64;
    }
  }
  void erase(std::uint32_t number) noexcept {
    for (std::vector<std::uint64_t>& level : levels_) {
      std::uint64_t& word = level[number / 64];
      word &= ~(std::uint64_t{1} << (number % 64));
      if (word != 0) return;
      number /= 64;
    }
  }
  // The largest number; the set must not be empty.
  std::uint32_t largest() const noexcept {
    std::uint32_t number = 0;
    for (std::size_t level = levels_.size(); level > 0; --level) {
      number = number * 64 + static_cast<std::uint32_t>(std::bit_width(levels_[level - 1][number]) - 1);
    }
    return number;
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;  // a bit of a level: whether a word below it has one
};

// Hit tokens of a cache of `size` blocks that knows the future and need not store a block: a bound for one request at
// a time, because running requests hold no blocks in it. `next` is next_uses(visits, rows).
std::int64_t optimal_hit_tokens(const BlockVisits& visits, std::span<const std::int64_t> rows,
                                std::span<const std::uint32_t> next, std::size_t warm_up, std::uint64_t size);

}  // namespace understudy
