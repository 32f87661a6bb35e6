// The time of a step from the bytes that a GPU reads and the operations that it computes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/timing.hpp"

namespace understudy {

// Milliseconds on one rank, derived from a model, a GPU and the parallel layout. "Token" is a token of the step, padded
// where graphs are; "rank token" a token of any data-parallel rank.
struct StepCoefficients {
  double weights_ms = 0;                // linear weights, read once
  double token_ms = 0;                  // computing a token with them
  double expert_ms = 0;                 // weights of one expert in all layers, read once
  double local_experts = 0;             // experts on the rank
  double expert_share = 0;              // share of the experts that a token is sent to
  double expert_spread = 0;             // standard deviations by which the busiest of several groups exceeds the mean
  double draft_novelty = 1;             // share of a draft's experts that its request does not read anyway
  double expert_token_ms = 0;           // computing a rank token with them
  double head_ms = 0;                   // the output matrix, read once
  double head_sequence_ms = 0;          // computing the logits of a sequence
  double context_ms = 0;                // KV of a token of context
  double window_context_ms = 0;         // the same in layers with a sliding window
  std::uint64_t window = 0;             // window size; 0: no layer has one
  double mix = 1;                       // factor on the two when there is prefill
  double attention_ms = 0;              // a new prompt token with a token of its past
  double window_attention_ms = 0;       // the same in layers with a sliding window
  double draft_attention_ms = 0;        // a draft with a token of its past; 0: as a new prompt token
  double history_ms = 0;                // expanding the latent of a token that a prompt chunk finds in the cache
  double comm_ms = 0;                   // between tensor-parallel ranks, per step
  double comm_token_ms = 0;             // the same per token
  double comm_rank_token_ms = 0;        // between data-parallel ranks
  std::uint64_t ranks = 1;              // data-parallel; without their token count, each computes as much as this one
  double step_ms = 0;                   // overhead per step
  double sequence_ms = 0;               // overhead per sequence
  double prefill_ms = 0;                // overhead of any prefill
  double floor_ms = 0;                  // least time of a step with prefill that is too large for a graph
  std::uint64_t floor_above = 0;        // such steps have more tokens than this
  std::vector<std::uint64_t> captures;  // sizes of graphs, rising; a step is padded to the next
  double softness = 2;                  // reading and computing overlap: (a^p + b^p)^(1/p)

  // One of the numbers above, by its name; ConfigError when there is none.
  void set(std::string_view name, double value);
};

// Range of the steps that the coefficients were fitted on: the maximum of each.
struct TimingDomain {
  std::uint64_t tokens = ~std::uint64_t{0};
  std::uint64_t requests = ~std::uint64_t{0};
  std::uint64_t context_tokens = ~std::uint64_t{0};  // of decoding requests
  std::uint64_t prompt_tokens = ~std::uint64_t{0};   // longest prompt, this chunk included
};

// Rises with every argument; affine in the context for steps that only decode.
class PhysicalTiming final : public TimingModel {
 public:
  // ConfigError names the coefficient that is not finite, negative, or contradicts another.
  explicit PhysicalTiming(StepCoefficients coefficients, TimingDomain domain = {});

  double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override;
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override;
  double least_ms(const DecodeLoad& load, std::uint64_t mean_context, std::uint64_t capacity_tokens,
                  const Speedups& speedups) const override;
  std::uint64_t window() const noexcept override { return of_.window == 0 ? kNoWindow : of_.window; }
  std::uint64_t largest_graph() const noexcept override { return of_.floor_above; }
  bool covers(const StepLoad& load) const noexcept override;
  bool covers(const DecodeLoad& load) const noexcept override;

 private:
  std::uint64_t of_all_ranks(const StepLoad& load) const noexcept {
    return load.rank_tokens == 0 ? load.tokens * of_.ranks : load.rank_tokens;
  }
  // Time of decodes to read their context, and of their drafts to attend to it, which overlap.
  double decodes_ms(const StepLoad& load) const;
  // Time without attention and prefill overhead, for `tokens` tokens and `rows` rows of the output matrix.
  double base_ms(std::uint64_t tokens, std::uint64_t sequences, std::uint64_t rows, std::uint64_t rank_tokens,
                 std::uint64_t drafts = 0) const;
  double experts_ms(std::uint64_t rank_tokens, std::uint64_t familiar) const;
  double context_ms(std::uint64_t context, std::uint64_t windowed) const;
  double soft(double a, double b) const;
  std::uint64_t padded(std::uint64_t tokens) const;

  StepCoefficients of_;
  TimingDomain domain_;
  std::vector<std::uint64_t> padded_;   // by tokens, up to the largest graph
  std::vector<double> decode_base_ms_;  // by requests, for as many as a batch usually has
};

}  // namespace understudy
