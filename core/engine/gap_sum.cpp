#include "engine/gap_sum.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace understudy {

namespace {

constexpr unsigned kKeyShift = 32;   // position of a gap in its word
constexpr unsigned kDigitBits = 10;  // three digits make a second

// Radix sort by gap, least significant digit first. All digits are counted in one pass.
void sort_packed(std::vector<std::uint64_t>& packed, std::vector<std::uint64_t>& sorted, std::uint64_t longest_ns) {
  constexpr std::size_t kDigits = (kKeyShift + kDigitBits - 1) / kDigitBits;
  constexpr std::size_t kValues = std::size_t{1} << kDigitBits;
  const auto digit = [](std::uint64_t gap, std::size_t place) {
    return (gap >> (kKeyShift + place * kDigitBits)) % kValues;
  };
  std::size_t places = 0;
  while (longest_ns >> (places * kDigitBits) != 0) ++places;
  std::array<std::array<std::uint32_t, kValues>, kDigits> starts{};
  for (const std::uint64_t gap : packed) {
    for (std::size_t place = 0; place < places; ++place) ++starts[place][digit(gap, place)];
  }
  sorted.resize(packed.size());
  for (std::size_t place = 0; place < places; ++place) {
    std::array<std::uint32_t, kValues>& start = starts[place];
    std::uint32_t sum = 0;
    for (std::uint32_t& count : start) sum += std::exchange(count, sum);
    for (const std::uint64_t gap : packed) sorted[start[digit(gap, place)]++] = gap;
    packed.swap(sorted);
  }
}

}  // namespace

// Which of two is next is a matter of chance: nothing here has to guess.
Gaps merge_gaps(std::span<const GapCount> a, std::span<const GapCount> b) {
  Gaps out(a.size() + b.size());
  GapCount* next = out.data();
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    const GapCount x = a[i];
    const GapCount y = b[j];
    const bool from_a = x.gap_ns <= y.gap_ns;
    const bool from_b = y.gap_ns <= x.gap_ns;
    *next++ = {from_a ? x.gap_ns : y.gap_ns, (from_a ? x.count : 0) + (from_b ? y.count : 0)};
    i += from_a ? 1 : 0;
    j += from_b ? 1 : 0;
  }
  next = std::copy(a.begin() + static_cast<std::ptrdiff_t>(i), a.end(), next);
  next = std::copy(b.begin() + static_cast<std::ptrdiff_t>(j), b.end(), next);
  out.resize(static_cast<std::size_t>(next - out.data()));
  return out;
}

void GapSum::add(Gaps gaps) {
  if (gaps.empty()) return;
  lists_.push_back(std::move(gaps));
  while (lists_.size() > 1 && lists_[lists_.size() - 2].size() <= 2 * lists_.back().size()) merge_last();
}

Gaps GapSum::take() {
  fold();
  while (lists_.size() > 1) merge_last();
  Gaps all;
  if (!lists_.empty()) all = std::move(lists_.front());
  lists_.clear();
  return all;
}

void GapSum::merge_last() {
  Gaps merged = merge_gaps(lists_[lists_.size() - 2], lists_.back());
  lists_.pop_back();
  lists_.back() = std::move(merged);
}

// Turn gaps that were added one by one into a list.
void GapSum::fold() {
  const auto list = [](std::size_t most, auto& from, auto gap_of) {
    Gaps out;
    out.reserve(most);
    for (const auto& each : from) {
      const GapCount gap = gap_of(each);
      if (!out.empty() && out.back().gap_ns == gap.gap_ns) {
        out.back().count += gap.count;
      } else {
        out.push_back(gap);
      }
    }
    return out;
  };
  if (!packed_.empty()) sort_packed(packed_, sorted_, longest_ns_);
  add(list(packed_.size(), packed_, [](std::uint64_t gap) {
    return GapCount{static_cast<std::int64_t>(gap >> kCountBits), static_cast<std::int64_t>(gap & (kShort - 1))};
  }));
  packed_.clear();
  longest_ns_ = 0;
  if (rare_.empty()) return;
  std::ranges::sort(rare_, {}, &GapCount::gap_ns);
  add(list(rare_.size(), rare_, [](const GapCount& gap) { return gap; }));
  rare_.clear();
}

}  // namespace understudy
