#include "engine/token_log.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace understudy {

namespace {

// A gap below 2^32 ns (4.3 s) and its count share a word.
constexpr unsigned kCountBits = 32;
constexpr std::int64_t kShort = std::int64_t{1} << kCountBits;
constexpr unsigned kDigitBits = 10;  // three digits make a second

// Adds a gap that is no shorter than the last.
void append(Gaps& out, const GapCount& gap) {
  if (!out.empty() && out.back().gap_ns == gap.gap_ns) {
    out.back().count += gap.count;
  } else {
    out.push_back(gap);
  }
}

// By gap, least significant digit first: there is one a step. Digits are counted in one pass over all.
void sort_packed(std::vector<std::uint64_t>& packed, std::vector<std::uint64_t>& sorted, std::uint64_t longest_ns) {
  constexpr std::size_t kDigits = (kCountBits + kDigitBits - 1) / kDigitBits;
  constexpr std::size_t kValues = std::size_t{1} << kDigitBits;
  const auto digit = [](std::uint64_t gap, std::size_t place) {
    return (gap >> (kCountBits + place * kDigitBits)) % kValues;
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

Gaps TokenLog::take_gaps() {
  fold_gaps();
  return std::exchange(folded_, {});
}

void TokenLog::fold(std::uint64_t first_needed) {
  fold_gaps();
  ends_.erase(ends_.begin(), ends_.begin() + static_cast<std::ptrdiff_t>(first_needed - first_kept_));
  first_kept_ = first_needed;
  crowd_ = std::max({keeps_gaps_ ? kCrowd : kCrowdWithoutGaps, 2 * ends_.size(), folded_.size()});
}

void TokenLog::fold_gaps() {
  // One fold needs as much room as the next, and memory that goes back to the system comes from there page by page.
  static thread_local std::vector<std::uint64_t> packed;
  static thread_local std::vector<std::uint64_t> sorted;
  static thread_local Gaps fresh;
  packed.clear();
  fresh.clear();
  Gaps others;
  std::uint64_t longest_ns = 0;
  const auto add = [&](std::int64_t gap_ns, std::int64_t count) {
    if (gap_ns < kShort && count < kShort) {
      packed.push_back((static_cast<std::uint64_t>(gap_ns) << kCountBits) | static_cast<std::uint64_t>(count));
      longest_ns = std::max(longest_ns, static_cast<std::uint64_t>(gap_ns));
    } else {
      others.push_back({gap_ns, count});
    }
  };
  const std::size_t steps = std::min(gap_changes_.size(), ends_.size());
  packed.reserve(steps + odd_gaps_.size());
  std::int64_t requests = 0;
  for (std::size_t step = 1; step < steps; ++step) {
    requests += gap_changes_[step];
    if (requests > 0) add(ends_[step] - ends_[step - 1], requests);
  }
  for (const std::int64_t gap_ns : odd_gaps_) add(gap_ns, 1);
  if (zero_gaps_ > 0) add(0, zero_gaps_);

  sort_packed(packed, sorted, longest_ns);
  fresh.resize(packed.size());
  std::size_t kept = 0;
  for (const std::uint64_t packed_gap : packed) {
    const auto gap_ns = static_cast<std::int64_t>(packed_gap >> kCountBits);
    const auto count = static_cast<std::int64_t>(packed_gap % std::uint64_t{kShort});
    if (kept > 0 && fresh[kept - 1].gap_ns == gap_ns) {
      fresh[kept - 1].count += count;
    } else {
      fresh[kept++] = {gap_ns, count};
    }
  }
  fresh.resize(kept);
  if (!others.empty()) {
    std::sort(others.begin(), others.end(), [](const GapCount& a, const GapCount& b) { return a.gap_ns < b.gap_ns; });
    Gaps long_gaps;
    for (const GapCount& gap : others) append(long_gaps, gap);
    fresh = merge_gaps(fresh, long_gaps);
  }
  folded_ = folded_.empty() ? std::move(fresh) : merge_gaps(folded_, fresh);
  gap_changes_.clear();
  odd_gaps_.clear();
  zero_gaps_ = 0;
  if (packed.capacity() > 4 * kCrowd) {
    std::vector<std::uint64_t>().swap(packed);
    std::vector<std::uint64_t>().swap(sorted);
    Gaps().swap(fresh);
  }
}

void TokenLog::add_sample(const EngineSample& now) {
  touched_ = false;
  if (state_) {
    EngineSample ended = *state_;
    if (ended == EngineSample{ended.time_ns, now.running, now.waiting, now.active_blocks, now.cached_blocks,
                              now.held_blocks, now.host_blocks}) {
      return;
    }
    ended.time_ns = grid_point(ended.time_ns);
    if (ended.time_ns < now.time_ns) samples_.push_back(ended);
    if (samples_.size() == kMaxSamples) coarsen_grid(now.time_ns);
  }
  state_ = now;
}

std::vector<EngineSample> TokenLog::samples() const {
  std::vector<EngineSample> out = samples_;
  if (state_) out.push_back(*state_);
  return out;
}

// At a point of the coarser grid holds the last state met until then, unless it ended before (at `now_ns`).
void TokenLog::coarsen_grid(std::int64_t now_ns) {
  while (samples_.size() > kMaxSamples / 2) {
    grid_ns_ *= 2;
    std::size_t kept = 0;
    for (EngineSample sample : samples_) {
      sample.time_ns = grid_point(sample.time_ns);
      if (kept > 0 && samples_[kept - 1].time_ns == sample.time_ns) --kept;
      samples_[kept++] = sample;
    }
    if (samples_[kept - 1].time_ns >= now_ns) --kept;
    samples_.resize(kept);
  }
}

}  // namespace understudy
