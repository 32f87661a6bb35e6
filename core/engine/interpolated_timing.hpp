// Step times interpolated from measurements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/split_timing.hpp"

namespace understudy {

// Linear over new prompt tokens, bilinear over (context tokens, mean context); both go on linearly past the grid.
// Prefill is at least 0, decode at least 1 ms.
class InterpolatedTiming final : public SplitTiming {
 public:
  // Axes must rise strictly and have at least two points; `decode_itl_ms` is row-major, a row for each active_kv.
  InterpolatedTiming(std::vector<double> prefill_isl, std::vector<double> prefill_ttft_ms,
                     std::vector<double> decode_active_kv, std::vector<double> decode_context,
                     std::vector<double> decode_itl_ms);

  double prefill_ms(std::uint64_t requests, std::uint64_t mean_input, std::uint64_t mean_cached) const override;
  double decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                   std::uint64_t capacity_tokens) const override;
  double drafts_ms(std::uint64_t drafts) const override;  // as of more tokens of a prompt
  double least_decode_ms(std::uint64_t requests, std::uint64_t context_tokens, std::uint64_t mean_context,
                         std::uint64_t capacity_tokens) const override {
    return rises_ ? decode_ms(requests, context_tokens, mean_context, capacity_tokens) : 1.0;
  }

 private:
  std::vector<double> prefill_isl_;
  std::vector<double> prefill_ttft_ms_;
  std::vector<double> decode_active_kv_;
  std::vector<double> decode_context_;
  std::vector<double> decode_itl_ms_;
  bool rises_ = true;  // decode, along both axes
};

}  // namespace understudy
