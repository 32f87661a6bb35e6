// What one forward pass of an engine works on, and what waits for the next.
#pragma once

#include <cstdint>

namespace understudy {

// Count, sum and population variance of lengths, seen one after the other (Welford's method).
class LengthSpread {
 public:
  void add(std::uint64_t tokens) noexcept {
    ++count_;
    sum_ += tokens;
    const double value = static_cast<double>(tokens);
    const double from_mean = value - mean_;
    mean_ += from_mean / static_cast<double>(count_);
    squares_ += from_mean * (value - mean_);
  }

  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t sum() const noexcept { return sum_; }
  double variance() const noexcept { return count_ == 0 ? 0 : squares_ / static_cast<double>(count_); }

 private:
  std::uint64_t count_ = 0;
  std::uint64_t sum_ = 0;
  double mean_ = 0;
  double squares_ = 0;  // of the differences from the mean, together
};

struct ForwardPass {
  LengthSpread prefill_lengths;          // whole prompts of those that compute prompt tokens
  std::uint64_t prefill_tokens = 0;      // that these compute
  std::uint64_t prefill_kv_tokens = 0;   // that they had before
  LengthSpread decode_kv_tokens;         // contexts of the others
  LengthSpread queued_prefill_lengths;   // prompts that never ran
  LengthSpread queued_decode_kv_tokens;  // preempted: prompt and output
  std::int64_t duration_ns = 0;
};

}  // namespace understudy
