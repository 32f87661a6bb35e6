// Times between tokens, and how often each occurred.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_allocator.hpp"

namespace understudy {

// A time between two tokens of one request, and how often it occurred.
struct GapCount {
  std::int64_t gap_ns;
  std::int64_t count;
};
using Gaps = std::vector<GapCount, HugeAllocator<GapCount>>;  // there is one for nearly every step

// The sum of two lists of gaps that ascend without repeats; so does the result.
Gaps merge_gaps(std::span<const GapCount> a, std::span<const GapCount> b);

// The gaps of any number of engines, in any order. They are sorted together, and seldom: a list for each engine would
// have to be merged with all others.
class GapSum {
 public:
  // Reserve room for at most `gaps` single additions.
  void expect(std::size_t gaps) {
    const std::size_t most = std::min(packed_.size() + gaps, kMany);
    if (most > packed_.capacity()) packed_.reserve(std::clamp(2 * packed_.capacity(), most, kMany));
  }
  void add(std::int64_t gap_ns, std::int64_t count) {
    if (gap_ns >= kShort || count >= kShort) return add_rare({gap_ns, count});
    packed_.push_back((static_cast<std::uint64_t>(gap_ns) << kCountBits) | static_cast<std::uint64_t>(count));
    longest_ns_ |= static_cast<std::uint64_t>(gap_ns);
    if (packed_.size() == kMany) fold();
  }
  void add(Gaps gaps);  // ascending, without repeats
  // All of them, ascending and without repeats; none are left.
  Gaps take();

 private:
  // A gap below 2^32 ns (4.3 s) and its count share a word.
  static constexpr unsigned kCountBits = 32;
  static constexpr std::int64_t kShort = std::int64_t{1} << kCountBits;
  static constexpr std::size_t kMany = std::size_t{1} << 18;

  void add_rare(const GapCount& gap) {
    rare_.push_back(gap);
    if (rare_.size() == kMany) fold();
  }
  void fold();
  void merge_last();

  std::vector<std::uint64_t> packed_;
  std::vector<std::uint64_t> sorted_;  // reused buffer
  std::uint64_t longest_ns_ = 0;       // longest packed gap: no bit is higher
  std::vector<GapCount> rare_;
  std::vector<Gaps> lists_;  // each less than half as long as the one before
};

}  // namespace understudy
