// Times between tokens, and how often each occurred.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/huge_allocator.hpp"

namespace understudy {

using GapColumn = std::vector<std::int64_t, HugeAllocator<std::int64_t>>;

// The gaps of any number of engines, in any order. Equal gaps are counted in one place at once: a run has many times
// as many steps as different gaps, and only those are sorted, once.
class GapSum {
 public:
  void add(std::int64_t gap_ns, std::int64_t count) {
    if (gap_ns >= kShort || count >= kShort) return add_rare(gap_ns, count);
    if (2 * different_ >= places_.size()) grow(different_ + 1);
    Gap& gap = place_of(static_cast<std::uint32_t>(gap_ns));
    if (gap.count == 0) {
      gap.gap_ns = static_cast<std::uint32_t>(gap_ns);
      ++different_;
    } else if (gap.count + count >= kShort) {
      return add_rare(gap_ns, count);
    }
    gap.count += static_cast<std::uint32_t>(count);
  }
  void add(GapSum gaps);
  // Write all of them, ascending and without repeats; none are left.
  void take(GapColumn& gap_ns, GapColumn& counts);

 private:
  // A gap below 2^32 ns (4.3 s) and its count take 8 bytes; all others are rare.
  static constexpr std::int64_t kShort = std::int64_t{1} << 32;
  struct Gap {
    std::uint32_t gap_ns;
    std::uint32_t count;  // 0: the place is free
  };
  using Places = std::vector<Gap, HugeAllocator<Gap>>;

  // The place of this gap, or the free one that it would get.
  Gap& place_of(std::uint32_t gap_ns) noexcept {
    const std::size_t last = places_.size() - 1;
    std::size_t at = std::uint64_t{gap_ns} * 0x9E3779B97F4A7C15u >> shift_;
    while (places_[at].count != 0 && places_[at].gap_ns != gap_ns) at = (at + 1) & last;
    return places_[at];
  }
  void add_rare(std::int64_t gap_ns, std::int64_t count) { rare_[gap_ns] += count; }
  void grow(std::size_t gaps);
  std::span<const Gap> sorted();  // overwrites the table

  Places places_;  // a hash table, at most half full
  unsigned shift_ = 0;
  std::size_t different_ = 0;
  std::map<std::int64_t, std::int64_t> rare_;
};

}  // namespace understudy
