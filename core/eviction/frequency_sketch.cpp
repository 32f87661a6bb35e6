#include "eviction/frequency_sketch.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "base/assert.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

FrequencySketch::FrequencySketch(std::size_t capacity)
    : words_(std::max<std::size_t>(1, capacity / 4)), sample_(10 * std::max<std::uint64_t>(1, capacity)) {}

FrequencySketch::Cell FrequencySketch::cell(const LineageHash& key, std::size_t row) const noexcept {
  const std::uint64_t hash = xxh3_64_pair_with_secret(key.lo, key.hi, row);
  const std::size_t word = static_cast<std::size_t>(((hash >> 32) * words_.size()) >> 32);
  return {word, static_cast<unsigned>(hash & 15) * 4};
}

void FrequencySketch::touch(const LineageHash& key) noexcept {
  std::array<Cell, kRows> cells;
  unsigned least = kMax;
  for (std::size_t row = 0; row < kRows; ++row) {
    cells[row] = cell(key, row);
    least = std::min(least, read(cells[row]));
  }
  if (least == kMax) return;
  for (const Cell& at : cells) {
    // Read again: two rows of one key may share a counter.
    if (read(at) == least) words_[at.word] += std::uint64_t{1} << at.shift;
  }
  if (++seen_ >= sample_) halve();
}

unsigned FrequencySketch::estimate(const LineageHash& key) const noexcept {
  unsigned least = kMax;
  for (std::size_t row = 0; row < kRows; ++row) least = std::min(least, read(cell(key, row)));
  return least;
}

void FrequencySketch::halve() noexcept {
  std::uint64_t odd = 0;
  for (std::size_t i = 0; i < words_.size(); ++i) {
    std::uint64_t& word = words_[i];
    if (word == 0) continue;  // perhaps never written: do not touch its page
    odd += static_cast<std::uint64_t>(std::popcount(word & 0x1111111111111111u));
    word = (word >> 1) & 0x7777777777777777u;
  }
  const std::uint64_t half = seen_ / 2;
  // Every odd counter lost half a use.
  seen_ = half > odd / 4 ? half - odd / 4 : 0;
  UNDERSTUDY_ASSERT(seen_ < sample_, "halving leaves room for new uses");
}

}  // namespace understudy
