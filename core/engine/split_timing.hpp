// Models that time prompts and decoding apart, and add the two: those of Dynamo's mocker.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/timing.hpp"

namespace understudy {

class SplitTiming : public TimingModel {
 public:
  virtual double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const = 0;
  virtual double decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                           std::uint64_t capacity_tokens) const = 0;
  // Verifying this many drafts, which decode beside their requests.
  virtual double drafts_ms(std::uint64_t /*drafts*/) const { return 0; }
  virtual double least_decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const { return 0; }

  double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const final {
    const MockerLoad& counted = load.mocker;
    double ms = 0;
    if (counted.prefill_requests > 0) {
      ms += checked_ms(prefill_ms(counted.prefill_requests, counted.prefill_input_tokens / counted.prefill_requests,
                                  counted.prefill_cached_tokens / counted.prefill_requests) /
                       speedups.all);
    }
    if (counted.decode_requests > 0) {
      const double decoding = decode_ms(counted.decode_requests + load.drafts, counted.decode_context_tokens,
                                        counted.decode_context_tokens / counted.decode_requests, capacity_tokens);
      ms += checked_ms(decoding / (speedups.all * speedups.decode));
    }
    if (load.drafts > 0) ms += checked_ms(drafts_ms(load.drafts) / speedups.all);
    return ms;
  }
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const final {
    if (load.requests == 0) return 0;
    return checked_ms(
        decode_ms(load.requests, load.context_tokens, load.context_tokens / load.requests, capacity_tokens) /
        (speedups.all * speedups.decode));
  }
  double least_ms(const DecodeLoad& load, std::uint64_t mean_context, std::uint64_t capacity_tokens,
                  const Speedups& speedups) const final {
    return least_decode_ms(load.requests, load.context_tokens, mean_context, capacity_tokens) /
           (speedups.all * speedups.decode);
  }
  bool times_decoding_apart() const noexcept final { return true; }
};

// The mocker's default: prefill quadratic in new tokens, decode quadratic in KV utilisation.
class PolynomialTiming final : public SplitTiming {
 public:
  double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const override {
    const double t = static_cast<double>(requests * (mean_input - mean_cached));
    return t == 0 ? 0 : 4.209989e-7 * t * t + kTokenMs * t + 16.50142;
  }
  // A draft takes as long as another token of a prompt.
  double drafts_ms(std::uint64_t drafts) const override { return kTokenMs * static_cast<double>(drafts); }
  double decode_ms(std::uint64_t, std::uint64_t context_tokens, std::uint64_t,
                   std::uint64_t capacity_tokens) const override {
    const double u = capacity_tokens == 0
                         ? 1.0
                         : std::fmin(1.0, static_cast<double>(context_tokens) / static_cast<double>(capacity_tokens));
    return std::fmax(1.0, -25.74 * u * u + 54.01 * u + 5.74);
  }
  bool next_steps_ms(const DecodeLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups,
                     std::span<double> out) const override {
    const double speedup = speedups.all * speedups.decode;
    std::uint64_t context = load.context_tokens;
    for (double& ms : out) {
      ms = decode_ms(load.requests, context, 0, capacity_tokens) / speedup;
      context += load.requests;
    }
    return load.requests > 0;
  }
  // A valid bound, because the time rises with utilisation up to 1.
  double least_decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                         std::uint64_t capacity_tokens) const override {
    return decode_ms(requests, context_tokens, mean_context, capacity_tokens);
  }

 private:
  static constexpr double kTokenMs = 1.518344e-2;
};

class ConstantTiming final : public SplitTiming {
 public:
  ConstantTiming(double prefill, double decode) : prefill_(prefill), decode_(decode) {}
  double prefill_ms(std::uint64_t, std::uint64_t, std::uint64_t) const override { return prefill_; }
  double decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const override { return decode_; }
  double least_decode_ms(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t) const override { return decode_; }

 private:
  double prefill_;
  double decode_;
};

}  // namespace understudy
