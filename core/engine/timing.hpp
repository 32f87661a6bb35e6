// How long a step takes.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>

#include "base/errors.hpp"

namespace understudy {

// What a step computes, as the timing models see it.
struct StepLoad {
  std::uint64_t prefill_requests = 0;       // requests that compute prompt tokens
  std::uint64_t prefill_input_tokens = 0;   // sum of their prompt lengths so far, this chunk included
  std::uint64_t prefill_cached_tokens = 0;  // of those, computed before this step or taken from the cache
  std::uint64_t decode_requests = 0;        // requests that sample a token
  std::uint64_t decode_context_tokens = 0;  // sum of their lengths
};

class TimingModel {
 public:
  virtual ~TimingModel() = default;
  // Milliseconds, unscaled; `capacity_tokens` is the size of the KV cache. Must not be negative or not a number.
  virtual double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const = 0;
  virtual double decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                           std::uint64_t capacity_tokens) const = 0;
  // What every step takes whose decode part is at least this, or 0 where nobody can tell.
  virtual double least_decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const { return 0; }
};

// The mocker's default: prefill quadratic in new tokens, decode quadratic in KV utilisation.
class PolynomialTiming final : public TimingModel {
 public:
  double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const override {
    const double t = static_cast<double>(requests * (mean_input - mean_cached));
    return t == 0 ? 0 : 4.209989e-7 * t * t + 1.518344e-2 * t + 16.50142;
  }
  double decode_ms(std::uint64_t, std::uint64_t context_tokens, std::uint64_t,
                   std::uint64_t capacity_tokens) const override {
    const double u = capacity_tokens == 0
                         ? 1.0
                         : std::fmin(1.0, static_cast<double>(context_tokens) / static_cast<double>(capacity_tokens));
    return std::fmax(1.0, -25.74 * u * u + 54.01 * u + 5.74);
  }
  // It rises with utilisation all the way to 1.
  double least_decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                         std::uint64_t capacity_tokens) const override {
    return decode_ms(requests, context_tokens, mean_context, capacity_tokens);
  }
};

class ConstantTiming final : public TimingModel {
 public:
  ConstantTiming(double prefill, double decode) : prefill_(prefill), decode_(decode) {}
  double prefill_ms(std::uint64_t, std::uint64_t, std::uint64_t) const override { return prefill_; }
  double decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const override { return decode_; }
  double least_decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const override { return decode_; }

 private:
  double prefill_;
  double decode_;
};

// A model with its speed-ups. Durations are rounded to nanoseconds once, here.
struct StepTiming {
  std::shared_ptr<const TimingModel> model = std::make_shared<PolynomialTiming>();
  double speedup_ratio = 1.0;
  double decode_speedup_ratio = 1.0;
  // Whether a request whose prompt ends in a step is among those that decode in it. Dynamo's mocker of 1.6.1 charges
  // no decode time for it.
  bool charges_first_token = true;

  std::int64_t duration_ns(const StepLoad& load, std::uint64_t capacity_tokens) const {
    double ms = 0;
    if (load.prefill_requests > 0) {
      ms += checked(model->prefill_ms(load.prefill_requests, load.prefill_input_tokens / load.prefill_requests,
                                      load.prefill_cached_tokens / load.prefill_requests) /
                    speedup_ratio);
    }
    if (load.decode_requests > 0) {
      ms += checked(model->decode_ms(load.decode_requests, load.decode_context_tokens,
                                     load.decode_context_tokens / load.decode_requests, capacity_tokens) /
                    (speedup_ratio * decode_speedup_ratio));
    }
    return std::llround(ms * 1e6);
  }

  // No step is shorter that decodes at least so many requests with so much context, and this mean of it; the last
  // digit of a double may say otherwise, hence the nanosecond.
  std::int64_t least_ns(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                        std::uint64_t capacity_tokens) const {
    const double ms = model->least_decode_ms(requests, context_tokens, mean_context, capacity_tokens) /
                      (speedup_ratio * decode_speedup_ratio);
    return ms > 0 && ms < 4e12 ? std::llround(ms * 1e6) - 1 : 0;
  }

 private:
  static double checked(double ms) {
    if (!(ms >= 0) || ms > 4e12)
      throw Error(ErrorKind::InvalidArgument, "the timing model returned ", ms, " ms for a step");
    return ms;
  }
};

}  // namespace understudy
