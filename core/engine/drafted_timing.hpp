// Step times with speculation: those of the model, and of the drafter that runs behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "engine/timing.hpp"

namespace understudy {

// The drafter's first pass computes all tokens of the step, prompts and rejected drafts included, because it needs
// their KV; each further pass computes a token of every request. A pass has one row of the output matrix for every
// request.
class DraftedTiming final : public TimingModel {
 public:
  DraftedTiming(std::shared_ptr<const TimingModel> target, std::shared_ptr<const TimingModel> first,
                std::shared_ptr<const TimingModel> further, std::uint32_t passes)
      : target_(std::move(target)), first_(std::move(first)), further_(std::move(further)), passes_(passes) {
    if (passes_ < 1) throw Error(ErrorKind::ConfigError, "passes of a drafter must be at least 1, got ", passes_);
  }

  double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override {
    const double ms = target_->step_ms(load, capacity_tokens, speedups);
    if (load.requests == 0) return ms;
    StepLoad first = load;
    first.drafts = 0;
    DecodeLoad further{load.requests, load.context_tokens, load.windowed_context, load.longest_context};
    for (const PrefillChunk& chunk : load.chunks) {
      const std::uint64_t context = std::uint64_t{chunk.tokens} + chunk.history;
      further.context_tokens += context;
      further.windowed_context += std::min(context, window());
    }
    return ms + first_->step_ms(first, capacity_tokens, speedups) + further_ms(further, capacity_tokens, speedups);
  }
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens,
                        const Speedups& speedups) const override {
    const double ms = target_->decode_step_ms(load, capacity_tokens, speedups);
    if (load.requests == 0) return ms;
    return ms + first_->decode_step_ms(load, capacity_tokens, speedups) + further_ms(load, capacity_tokens, speedups);
  }
  double least_ms(const DecodeLoad& load, std::uint64_t mean_context, std::uint64_t capacity_tokens,
                  const Speedups& speedups) const override {
    return target_->least_ms(load, mean_context, capacity_tokens, speedups) +
           first_->least_ms(load, mean_context, capacity_tokens, speedups) +
           further_->least_ms(load, mean_context, capacity_tokens, speedups) * (passes_ - 1);
  }
  std::uint64_t window() const noexcept override { return target_->window(); }
  bool needs_sums_only() const noexcept override {
    return target_->needs_sums_only() && first_->needs_sums_only() && further_->needs_sums_only();
  }
  bool wants_longest() const noexcept override { return target_->wants_longest(); }
  bool times_decoding_apart() const noexcept override { return target_->times_decoding_apart(); }
  std::uint64_t largest_graph() const noexcept override { return target_->largest_graph(); }
  bool covers(const StepLoad& load) const noexcept override { return target_->covers(load); }
  bool covers(const DecodeLoad& load) const noexcept override { return target_->covers(load); }

 private:
  double further_ms(const DecodeLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const {
    return passes_ == 1 ? 0 : (passes_ - 1) * further_->decode_step_ms(load, capacity_tokens, speedups);
  }

  std::shared_ptr<const TimingModel> target_;
  std::shared_ptr<const TimingModel> first_;
  std::shared_ptr<const TimingModel> further_;
  std::uint32_t passes_;
};

}  // namespace understudy
