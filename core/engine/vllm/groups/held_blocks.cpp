#include "engine/vllm/groups/held_blocks.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

void HeldBlocks::note_peaks() noexcept {
  for (std::size_t g = 0; g < counts_.size(); ++g) peaks_[g] = std::max(peaks_[g], counts_[g]);
}

void HeldBlocks::sample(std::int64_t now_ns) {
  if (counts_ == sampled_) return;
  // The counts were constant until now, so that calls without a change make no difference.
  if (sampled_.empty()) sampled_.resize(counts_.size());
  add_samples(now_ns);
  sampled_ = counts_;
  changed_ns_ = now_ns;
}

void HeldBlocks::add_samples(std::int64_t until_ns) {
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

std::vector<GroupReport::Sample> HeldBlocks::samples() const {
  std::vector<GroupReport::Sample> out = samples_;
  if (!sampled_.empty()) out.push_back({changed_ns_, sampled_});
  return out;
}

}  // namespace understudy
