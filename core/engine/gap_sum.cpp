#include "engine/gap_sum.hpp"

#include <array>
#include <bit>
#include <limits>
#include <utility>

namespace understudy {

void GapSum::add(GapSum gaps) {
  if (different_ < gaps.different_) std::swap(*this, gaps);
  grow(different_ + gaps.different_);  // in the order of their places, gaps would crowd one part of a smaller table
  for (const Gap& gap : gaps.places_) {
    if (gap.count > 0) add(gap.gap_ns, gap.count);
  }
  for (const auto& [gap_ns, count] : gaps.rare_) add_rare(gap_ns, count);
}

void GapSum::grow(std::size_t gaps) {
  std::size_t needed = 64;
  while (needed < 2 * gaps) needed *= needed < 65536 ? 4 : 2;
  if (needed <= places_.size()) return;
  const Places before = std::exchange(places_, Places(needed));
  shift_ = 64 - static_cast<unsigned>(std::countr_zero(needed));
  for (const Gap& gap : before) {
    if (gap.count > 0) place_of(gap.gap_ns) = gap;
  }
}

// Radix sort, least significant digit first. It needs no memory: the table has room for all gaps twice.
std::span<const GapSum::Gap> GapSum::sorted() {
  constexpr unsigned kDigitBits = 11;
  constexpr std::size_t kDigits = 3;
  constexpr std::size_t kValues = std::size_t{1} << kDigitBits;
  const auto digit = [](const Gap& gap, std::size_t place) { return (gap.gap_ns >> (place * kDigitBits)) % kValues; };
  std::array<std::array<std::uint32_t, kValues>, kDigits> starts{};
  std::size_t found = 0;
  for (std::size_t at = 0; found < different_; ++at) {
    const Gap gap = places_[at];
    places_[found] = gap;
    if (gap.count == 0) continue;
    ++found;
    for (std::size_t place = 0; place < kDigits; ++place) ++starts[place][digit(gap, place)];
  }
  Gap* from = places_.data();
  Gap* to = from + different_;
  for (std::size_t place = 0; place < kDigits; ++place) {
    std::array<std::uint32_t, kValues>& start = starts[place];
    std::uint32_t sum = 0;
    for (std::uint32_t& count : start) sum += std::exchange(count, sum);
    for (std::size_t i = 0; i < different_; ++i) to[start[digit(from[i], place)]++] = from[i];
    std::swap(from, to);
  }
  return {from, different_};
}

void GapSum::take(GapColumn& gap_ns, GapColumn& counts) {
  gap_ns.resize(different_ + rare_.size());
  counts.resize(gap_ns.size());
  std::size_t next = 0;
  auto rare = rare_.begin();
  const auto add_until = [&](std::int64_t end_ns) {
    for (; rare != rare_.end() && rare->first < end_ns; ++rare) {
      gap_ns[next] = rare->first;
      counts[next++] = rare->second;
    }
  };
  for (const Gap& gap : sorted()) {
    add_until(gap.gap_ns);
    gap_ns[next] = gap.gap_ns;
    counts[next] = gap.count;
    if (rare != rare_.end() && rare->first == gap.gap_ns) counts[next] += rare++->second;
    ++next;
  }
  add_until(std::numeric_limits<std::int64_t>::max());
  gap_ns.resize(next);
  counts.resize(next);
  *this = {};
}

}  // namespace understudy
