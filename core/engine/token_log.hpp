// Times when tokens became visible, kept as step ends and runs of steps; and samples of the engine's state over time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/gap_sum.hpp"
#include "engine/token_runs.hpp"

namespace understudy {

struct EngineSample {
  std::int64_t time_ns;
  std::uint32_t running;
  std::uint32_t waiting;
  std::uint32_t active_blocks;
  std::uint32_t cached_blocks;
  std::uint32_t held_blocks = 0;  // active blocks being copied to the host
  std::uint32_t host_blocks = 0;  // blocks on the host
  std::uint32_t kept_blocks = 0;  // active blocks of finished prompts that a peer will read

  bool operator==(const EngineSample&) const = default;
};

// Exact and small: all requests of a step get their tokens at its end, so a gap between two tokens is most often the
// length of a step, and how many requests saw that gap is a running sum of changes.
class TokenLog {
 public:
  std::uint64_t next_step() const noexcept { return first_kept_ + ends_.size(); }
  std::int64_t end_of(std::uint64_t step) const noexcept { return ends_[step - first_kept_]; }
  void end_step(std::int64_t end_ns) {
    if (ends_.size() == ends_.capacity()) make_room(1);
    ends_.push_back(end_ns);
  }
  void end_steps(std::span<const std::int64_t> ends_ns) {
    if (ends_.capacity() - ends_.size() < ends_ns.size()) make_room(ends_ns.size());
    ends_.insert(ends_.end(), ends_ns.begin(), ends_ns.end());
  }

  // Gaps are kept from now on; without this call there are none to take.
  void keep_gaps() noexcept {
    keeps_gaps_ = true;
    crowd_ = least_crowd_ = kCrowd;
  }
  // Gaps are added to this sum, which outlives the log, and not to one of its own.
  void share_gaps(GapSum& sum) noexcept { shared_ = &sum; }
  // Count the gaps of a complete request. Several tokens of one step arrive together: gaps of 0.
  void count_gaps(const TokenRuns& runs, std::uint64_t tokens) {
    if (!keeps_gaps_) return;
    zero_gaps_ += static_cast<std::int64_t>(tokens);
    if (gap_changes_.size() <= ends_.size()) {
      gap_changes_.reserve(ends_.capacity() + 1);
      gap_changes_.resize(ends_.size() + 1);
    }
    for (std::size_t i = 0; i < runs.size(); ++i) {
      zero_gaps_ -= runs[i].count;
      const std::uint64_t first = runs[i].first_step - first_kept_;
      ++gap_changes_[first + 1];
      --gap_changes_[first + runs[i].count];
      if (i > 0)
        odd_gaps_.push_back(end_of(runs[i].first_step) - end_of(runs[i - 1].first_step + runs[i - 1].count - 1));
    }
  }
  // The gaps of a request that has not ended: they are not counted here.
  std::vector<std::int64_t> list_gaps(const TokenRuns& runs, std::uint64_t tokens) const;
  // Adds every gap since the last call.
  void take_gaps(GapSum& out);

  // True when it is time to drop steps that no request needs. The memory left depends on the needed steps and on the
  // number of different gaps.
  bool crowded() const noexcept { return ends_.size() >= crowd_; }
  void fold(std::uint64_t first_needed, std::size_t asked);  // `asked`: requests examined to find that step
  std::size_t steps_kept() const noexcept { return ends_.size(); }

  // Whether the state may have changed without an event of a block or request: a request was submitted, or a copy
  // landed.
  bool wants_sample() const noexcept { return touched_; }
  void touch() noexcept { touched_ = true; }
  // Set the state of the engine from `now.time_ns` on. At equal times the last one counts.
  void add_sample(EngineSample now);
  const std::optional<EngineSample>& state() const noexcept { return state_; }  // the last sample; none yet: empty
  // The state at grid points of time, where it differs from the previous one, and the last one: a bounded number. Exact
  // for a short run; for a long one the grid is coarse, and states that last longer are sampled more often.
  std::vector<EngineSample> samples() const;

 private:
  static constexpr std::size_t kMaxSamples = 2048;

  std::int64_t grid_point(std::int64_t time_ns) const noexcept { return (time_ns + grid_ns_ - 1) & -grid_ns_; }
  void coarsen_grid(std::int64_t now_ns);

  static constexpr std::size_t kCrowd = 4096;
  static constexpr std::size_t kCrowdWithoutGaps = 1024;  // nothing to count: dropping steps costs little
  static constexpr std::size_t kCrowdOfMany = 65536;      // at most this for thousands of requests

  void make_room(std::size_t steps);
  void pour_gaps(GapSum& out);

  std::vector<std::int64_t> ends_;  // ends of the steps from first_kept_ on
  std::uint64_t first_kept_ = 0;
  bool keeps_gaps_ = false;
  std::size_t least_crowd_ = kCrowdWithoutGaps;
  std::size_t crowd_ = kCrowdWithoutGaps;
  GapSum* shared_ = nullptr;               // receives the gaps; null: the next one does
  GapSum gaps_;                            // gaps that were counted; the next three are still to be
  std::vector<std::int32_t> gap_changes_;  // change of the number of requests with a gap that ends with the step
  std::vector<std::int64_t> odd_gaps_;     // between runs: a preemption, or a step without this request
  std::int64_t zero_gaps_ = 0;             // within bursts
  std::vector<EngineSample> samples_;      // past states
  std::optional<EngineSample> state_;
  std::int64_t grid_ns_ = 1;  // a power of two
  bool touched_ = false;
};

}  // namespace understudy
