// Distinct blocks in the tables of requests, by KV cache group: now, over time, and at most.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/huge_array.hpp"
#include "engine/group_report.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A block that several requests share counts once. Entries without a block are passed over.
class HeldBlocks {
 public:
  HeldBlocks(std::size_t groups, std::size_t num_blocks) : counts_(groups), peaks_(groups), tables_(num_blocks) {}

  void add(std::size_t group, std::span<const SlotId> blocks) noexcept {
    for (const SlotId block : blocks) {
      if (block != kNoSlot) counts_[group] += tables_[block]++ == 0;
    }
  }
  void remove(std::size_t group, std::span<const SlotId> blocks) noexcept {
    for (const SlotId block : blocks) {
      if (block != kNoSlot) counts_[group] -= --tables_[block] == 0;
    }
  }
  // A request has taken its blocks.
  void note_peaks() noexcept;
  // Called in order of time, after each change and possibly more often.
  void sample(std::int64_t now_ns);

  const std::vector<std::uint64_t>& counts() const noexcept { return counts_; }
  const std::vector<std::uint64_t>& peaks() const noexcept { return peaks_; }
  // At equal distances, which depend on the length of the run alone, and at the last change.
  std::vector<GroupReport::Sample> samples() const;

 private:
  static constexpr std::size_t kMostSamples = 512;

  void add_samples(std::int64_t until_ns);

  std::vector<std::uint64_t> counts_;  // by group
  std::vector<std::uint64_t> peaks_;
  HugeArray<std::uint32_t> tables_;     // by block: tables that have it
  std::vector<std::uint64_t> sampled_;  // counts at the last change
  std::int64_t changed_ns_ = 0;         // its time
  std::vector<GroupReport::Sample> samples_;
  std::int64_t period_ns_ = 1'000'000;
  std::int64_t next_ns_ = 0;
};

}  // namespace understudy
