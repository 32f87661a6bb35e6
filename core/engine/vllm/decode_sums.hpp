// Sums over requests that decode together, step after step: every context grows by a token per step.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include "engine/timing.hpp"

namespace understudy {

class DecodeSums {
 public:
  explicit DecodeSums(const TimingModel& model) : window_(model.window()) {}

  const DecodeLoad& load() const noexcept { return load_; }
  std::uint64_t requests() const noexcept { return load_.requests; }
  std::uint64_t window() const noexcept { return window_; }

  void add(std::uint64_t context) noexcept {
    ++load_.requests;
    load_.context_tokens += context;
    load_.windowed_context += std::min(context, window_);
    load_.longest_context = std::max(load_.longest_context, context);
    below_ += context < window_ ? 1 : 0;
  }
  // The longest stays as it was: `set_longest` where that matters.
  void remove(std::uint64_t context) noexcept {
    --load_.requests;
    load_.context_tokens -= context;
    load_.windowed_context -= std::min(context, window_);
    below_ -= context < window_ ? 1 : 0;
  }
  void set_longest(std::uint64_t context) noexcept { load_.longest_context = context; }

  // A step passes. `pass_window` for each whose context is the window from then on.
  void grow() noexcept {
    load_.context_tokens += load_.requests;
    load_.windowed_context += below_;
    ++load_.longest_context;
  }
  void grow(std::uint64_t steps) noexcept { load_ = after(steps); }
  void pass_window() noexcept { --below_; }
  // Time of the next `steps` steps, if no context passes the window.
  std::int64_t duration_ns(std::uint64_t steps, const StepTiming& timing, std::uint64_t capacity_tokens) const {
    std::int64_t sum_ns = 0;
    std::array<std::int64_t, StepTiming::kMostAtOnce> durations_ns;
    for (std::uint64_t done = 0; done < steps;) {
      const auto some = std::span(durations_ns).first(std::min<std::uint64_t>(steps - done, durations_ns.size()));
      const std::size_t known = timing.next_steps_ns(after(done), capacity_tokens, some);
      sum_ns += std::accumulate(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(known), std::int64_t{0});
      done += known;
    }
    return sum_ns;
  }
  // Load after `steps` steps, if no context passes the window.
  DecodeLoad after(std::uint64_t steps) const noexcept {
    return {load_.requests, load_.context_tokens + steps * load_.requests, load_.windowed_context + steps * below_,
            load_.longest_context + steps};
  }

 private:
  DecodeLoad load_;
  std::uint64_t window_;
  std::uint64_t below_ = 0;  // contexts shorter than the window
};

// Prediction for the next steps, valid until a request is submitted: all counted requests decode in each of them.
struct Outlook {
  DecodeSums sums;
  std::uint64_t steps = ~std::uint64_t{0};      // until the first request finishes
  std::uint64_t to_window = ~std::uint64_t{0};  // until the first context reaches the model's window
  bool alone = false;                           // nothing else is computed
};

}  // namespace understudy
