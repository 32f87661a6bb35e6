// Step times of a model whose layers are divided among the stages of a pipeline.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/timing.hpp"

namespace understudy {

// Each stage is timed by a model of its own, its link to the stage before included. A batch alone in the pipeline takes
// the sum of all; the engine overlaps batches by the times of single stages.
class PipelinedTiming final : public TimingModel {
 public:
  explicit PipelinedTiming(std::vector<std::shared_ptr<const TimingModel>> stages) : stages_(std::move(stages)) {
    if (stages_.empty()) throw Error(ErrorKind::ConfigError, "a pipeline needs at least one stage");
  }

  double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override {
    double ms = 0;
    for (const auto& stage : stages_) ms += stage->step_ms(load, capacity_tokens, speedups);
    return ms;
  }
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens,
                        const Speedups& speedups) const override {
    double ms = 0;
    for (const auto& stage : stages_) ms += stage->decode_step_ms(load, capacity_tokens, speedups);
    return ms;
  }
  double least_ms(const DecodeLoad& load, std::uint64_t mean_context, std::uint64_t capacity_tokens,
                  const Speedups& speedups) const override {
    double ms = 0;
    for (const auto& stage : stages_) ms += stage->least_ms(load, mean_context, capacity_tokens, speedups);
    return ms;
  }
  std::size_t num_stages() const noexcept override { return stages_.size(); }
  double stage_ms(std::size_t stage, const StepLoad& load, std::uint64_t capacity_tokens,
                  const Speedups& speedups) const override {
    return stages_.at(stage)->step_ms(load, capacity_tokens, speedups);
  }
  std::uint64_t window() const noexcept override { return stages_.front()->window(); }
  bool needs_sums_only() const noexcept override {
    return std::ranges::all_of(stages_, [](const auto& stage) { return stage->needs_sums_only(); });
  }
  bool wants_longest() const noexcept override {
    return std::ranges::any_of(stages_, [](const auto& stage) { return stage->wants_longest(); });
  }
  std::uint64_t largest_graph() const noexcept override { return stages_.front()->largest_graph(); }
  bool covers(const StepLoad& load) const noexcept override {
    return std::ranges::all_of(stages_, [&](const auto& stage) { return stage->covers(load); });
  }
  bool covers(const DecodeLoad& load) const noexcept override {
    return std::ranges::all_of(stages_, [&](const auto& stage) { return stage->covers(load); });
  }

 private:
  std::vector<std::shared_ptr<const TimingModel>> stages_;
};

}  // namespace understudy
