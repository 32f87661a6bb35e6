// Distinct blocks in the tables of requests, by KV cache group: now, over time, and at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/huge_array.hpp"
#include "engine/group_report.hpp"
#include "slots/slot.hpp"

namespace understudy {

// A block that several requests share counts once. Where only tables reference blocks, the pool knows when the first
// one takes a block and the last one leaves it; else the tables of each block are counted here.
class HeldBlocks {
 public:
  explicit HeldBlocks(std::size_t groups) : counts_(groups), peaks_(groups), tables_(0) {}

  // Count the tables of each block, because transfers or copies reference blocks too. Call before the first request.
  void count_tables(std::size_t num_blocks) {
    counts_tables_ = true;
    tables_ = HugeArray<std::uint32_t>(num_blocks);
  }
  // Add or remove blocks that the first table has taken or the last one left.
  void add(std::size_t group, std::uint64_t blocks) noexcept { counts_[group] += blocks; }
  void remove(std::size_t group, std::uint64_t blocks) noexcept { counts_[group] -= blocks; }
  // Add free blocks that a table has taken.
  void add_free(std::size_t group, std::span<const SlotId> blocks) noexcept {
    counts_[group] += blocks.size();
    if (!counts_tables_) return;
    for (const SlotId block : blocks) tables_[block] = 1;
  }
  // Add a cached block that a table references; `was_free`: it had no reference before.
  void add_cached(std::size_t group, SlotId block, bool was_free) noexcept {
    counts_[group] += counts_tables_ ? tables_[block]++ == 0 : was_free;
  }
  // Remove blocks that a table has left, of which `freed` have no reference now. Entries without a block are skipped.
  void remove(std::size_t group, std::span<const SlotId> blocks, std::size_t freed) noexcept {
    if (!counts_tables_) {
      counts_[group] -= freed;
      return;
    }
    for (const SlotId block : blocks) {
      if (block != kNoSlot) counts_[group] -= --tables_[block] == 0;
    }
  }
  // Update the peaks; call when a request has taken its blocks.
  void note_peaks() noexcept;
  // Sample the counts; call in order of time, after each change and possibly more often.
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
  bool counts_tables_ = false;
  HugeArray<std::uint32_t> tables_;     // by block, if they are counted
  std::vector<std::uint64_t> sampled_;  // counts at the last change
  std::int64_t changed_ns_ = 0;         // its time
  std::vector<GroupReport::Sample> samples_;
  std::int64_t period_ns_ = 1'000'000;
  std::int64_t next_ns_ = 0;
};

inline void HeldBlocks::note_peaks() noexcept {
  for (std::size_t g = 0; g < counts_.size(); ++g) peaks_[g] = std::max(peaks_[g], counts_[g]);
}

inline void HeldBlocks::sample(std::int64_t now_ns) {
  if (counts_ == sampled_) return;
  // The counts were constant until now, so that calls without a change make no difference.
  if (sampled_.empty()) sampled_.resize(counts_.size());
  add_samples(now_ns);
  sampled_ = counts_;
  changed_ns_ = now_ns;
}

inline void HeldBlocks::add_samples(std::int64_t until_ns) {
  while (next_ns_ < until_ns) {
    samples_.push_back({next_ns_, sampled_});
    if (samples_.size() == kMostSamples) {
      for (std::size_t i = 0; 2 * i < samples_.size(); ++i) std::swap(samples_[i], samples_[2 * i]);
      samples_.resize(kMostSamples / 2);
      period_ns_ *= 2;
    }
    next_ns_ = samples_.back().time_ns + period_ns_;
  }
}

inline std::vector<GroupReport::Sample> HeldBlocks::samples() const {
  std::vector<GroupReport::Sample> out = samples_;
  if (!sampled_.empty()) out.push_back({changed_ns_, sampled_});
  return out;
}

}  // namespace understudy
