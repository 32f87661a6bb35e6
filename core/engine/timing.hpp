// How long a step takes.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/errors.hpp"
#include "engine/step_load.hpp"

namespace understudy {

// Divisors of step times.
struct Speedups {
  double all = 1.0;
  double decode = 1.0;  // additional divisor of times charged for decoding alone
};

inline bool is_duration(double ms) noexcept { return ms >= 0 && ms <= 4e12; }

inline double checked_ms(double ms) {
  if (!is_duration(ms)) {
    throw Error(ErrorKind::InvalidArgument, "the timing model returned ", ms, " ms for a step");
  }
  return ms;
}

// Milliseconds, not negative, finite. `capacity_tokens` is the size of the KV cache.
class TimingModel {
 public:
  static constexpr std::uint64_t kNoWindow = ~std::uint64_t{0};

  virtual ~TimingModel() = default;
  virtual double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const = 0;
  // The same as step_ms of StepLoad::of(load).
  virtual double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens,
                                const Speedups& speedups) const = 0;
  // The same for consecutive steps in which all of these decode, each context growing by a token per step. False, with
  // `out` unset: this model times one step at a time.
  virtual bool next_steps_ms(const DecodeLoad&, std::uint64_t /*capacity_tokens*/, const Speedups&,
                             std::span<double> /*out*/) const {
    return false;
  }
  // Lower bound for steps with at least this decode load and at least this mean context; 0 where it is unknown.
  virtual double least_ms(const DecodeLoad&, std::uint64_t /*mean_context*/, std::uint64_t /*capacity_tokens*/,
                          const Speedups&) const {
    return 0;
  }
  // Context of which layers with a sliding window read no more.
  virtual std::uint64_t window() const noexcept { return kNoWindow; }
  // Whether a DecodeLoad is sufficient input for a decode step; and whether the model reads its longest context.
  virtual bool needs_sums_only() const noexcept { return true; }
  virtual bool wants_longest() const noexcept { return false; }
  // Whether decoding has a time of its own within a step, which settings can change.
  virtual bool times_decoding_apart() const noexcept { return false; }
  // Most tokens of a step that runs in a captured graph: vLLM's default where the model does not know better.
  virtual std::uint64_t largest_graph() const noexcept { return 512; }
  // Stages of a pipeline that the model times one by one; 1: it times whole steps.
  virtual std::size_t num_stages() const noexcept { return 1; }
  virtual double stage_ms(std::size_t /*stage*/, const StepLoad& load, std::uint64_t capacity_tokens,
                          const Speedups& speedups) const {
    return step_ms(load, capacity_tokens, speedups);
  }
  // Whether the model's data covers such steps. A load below a covered one is covered.
  virtual bool covers(const StepLoad&) const noexcept { return true; }
  virtual bool covers(const DecodeLoad&) const noexcept { return true; }
};

// A model with its speed-ups. Durations are rounded to nanoseconds once, here.
struct StepTiming {
  std::shared_ptr<const TimingModel> model;
  Speedups speedups;
  // Whether a request whose prompt ends in a step is among those that decode in it, as the mocker counts. That of
  // 1.6.1 charges no decode time for it.
  bool charges_first_token = true;
  double slowdown = 1;  // by a fault: steps take this times as long

  std::int64_t duration_ns(const StepLoad& load, std::uint64_t capacity_tokens) const {
    return rounded(model->step_ms(load, capacity_tokens, speedups) * slowdown);
  }
  std::int64_t duration_ns(const DecodeLoad& load, std::uint64_t capacity_tokens) const {
    return rounded(model->decode_step_ms(load, capacity_tokens, speedups) * slowdown);
  }
  // Divide a step of `whole_ns` among the stages of a pipeline: by the model's times, or evenly if it knows no stages.
  void divide_ns(const StepLoad& load, std::uint64_t capacity_tokens, std::int64_t whole_ns,
                 std::span<std::int64_t> out) const {
    const auto stages = static_cast<std::int64_t>(out.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = model->num_stages() == out.size() ? rounded(model->stage_ms(i, load, capacity_tokens, speedups))
                                                 : whole_ns / stages + (std::int64_t(i) < whole_ns % stages ? 1 : 0);
    }
  }
  // Time the next steps in which all of these decode; returns how many were timed, from the first on: at least one, at
  // most `out.size()` (itself at most kMostAtOnce).
  static constexpr std::size_t kMostAtOnce = 32;
  std::size_t next_steps_ns(const DecodeLoad& first, std::uint64_t capacity_tokens, std::span<std::int64_t> out) const {
    std::array<double, kMostAtOnce> ms;
    if (out.size() > 1 && model->next_steps_ms(first, capacity_tokens, speedups, std::span(ms).first(out.size()))) {
      std::size_t known = 0;
      for (; known < out.size() && (known == 0 || is_duration(ms[known])); ++known) {
        out[known] = rounded(ms[known] * slowdown);
      }
      return known;
    }
    out[0] = duration_ns(first, capacity_tokens);
    return 1;
  }
  // Lower bound for steps with at least this decode load, reduced by a nanosecond for rounding errors.
  std::int64_t least_ns(const DecodeLoad& load, std::uint64_t mean_context, std::uint64_t capacity_tokens) const {
    const double ms = model->least_ms(load, mean_context, capacity_tokens, speedups) * slowdown;
    return ms > 0 && ms < 4e12 ? std::llround(ms * 1e6) - 1 : 0;
  }

 private:
  // Same result as llround, without the call: the fraction is exact.
  static std::int64_t rounded(double ms) {
    const double ns = checked_ms(ms) * 1e6;
    const auto whole = static_cast<std::int64_t>(ns);
    return whole + (ns - static_cast<double>(whole) >= 0.5 ? 1 : 0);
  }
};

}  // namespace understudy
