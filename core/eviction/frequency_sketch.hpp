// Recent use counts of hashes: a TinyLFU sketch of 4-bit counters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/huge_array.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

// Four counters per key, the least of which is the estimate (0..15). Word and counter come from different bits of each
// hash, and only the least counters grow, so keys used once stay cold. After ten times its capacity in uses, all
// counters are halved.
class FrequencySketch {
 public:
  explicit FrequencySketch(std::size_t capacity);

  void touch(const LineageHash& key) noexcept;
  unsigned estimate(const LineageHash& key) const noexcept;
  void halve() noexcept;

  std::size_t memory_bytes() const noexcept { return words_.size() * sizeof(std::uint64_t); }

 private:
  static constexpr std::size_t kRows = 4;
  static constexpr unsigned kMax = 15;
  struct Cell {
    std::size_t word;
    unsigned shift;
  };

  Cell cell(const LineageHash& key, std::size_t row) const noexcept;
  unsigned read(Cell cell) const noexcept { return static_cast<unsigned>(words_[cell.word] >> cell.shift) & kMax; }

  HugeArray<std::uint64_t> words_;
  std::uint64_t sample_;
  std::uint64_t seen_ = 0;
};

}  // namespace understudy
