// The time of a step from tables of kernels: microseconds by shape, linear between the points that were measured.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/timing.hpp"

namespace understudy {

// A time as a function of several numbers, linear in each. Below its first point an axis is constant where it has to
// be; beyond its last point, ConfigError unless the axis extrapolates from the last two.
class OpTable {
 public:
  static constexpr std::size_t kMostAxes = 4;
  struct Axis {
    std::string name;
    std::vector<double> at;  // rising
  };

  // `us` has a value for every combination, the last axis fastest; NaN where nothing was measured.
  OpTable(std::string name, std::vector<Axis> axes, std::vector<double> us, bool extrapolate);

  double us(std::span<const double> values) const;
  double us(double value) const { return us(std::span(&value, 1)); }

 private:
  [[noreturn]] void refuse_beyond(const Axis& axis, double value) const;
  [[noreturn]] void refuse_hole(std::span<const double> values) const;

  std::string name_;
  std::vector<Axis> axes_;
  std::vector<double> us_;
  bool extrapolate_;
};

struct OpTableSet {
  OpTable layer;                   // by tokens: linear and elementwise kernels of a layer
  OpTable once;                    // by tokens: kernels that run once per step
  OpTable head;                    // by rows of the output matrix: sequences, and drafts that are verified
  OpTable prompts;                 // attention of a layer, by new tokens and history
  OpTable decodes;                 // attention by requests and their mean context
  OpTable mixed;                   // attention by all four
  std::optional<OpTable> experts;  // time of a layer, by tokens of all ranks
  double layers = 0;
  double skew = 0;  // how far uneven contexts go from the time at the mean to that at the longest
  std::uint64_t ranks = 1;
  double comm_ms = 0;  // between GPUs: of a step, of a token, of a token of all ranks
  double comm_token_ms = 0;
  double comm_rank_token_ms = 0;
  std::vector<std::uint64_t> captures{};  // rising; a step is padded to the next
};

// Steps that only decode are piecewise affine in their contexts, and can be leapt over.
class OpTableTiming final : public TimingModel {
 public:
  explicit OpTableTiming(OpTableSet tables);

  double step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override;
  double decode_step_ms(const DecodeLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const override;
  bool wants_longest() const noexcept override { return of_.skew > 0; }
  std::uint64_t largest_graph() const noexcept override { return of_.captures.empty() ? 0 : of_.captures.back(); }

 private:
  double whole_ms(std::uint64_t tokens, std::uint64_t rows, std::uint64_t rank_tokens, double attention_us) const;
  double attention_us(const StepLoad& load) const;
  double decodes_us(double requests, double mean_context, double longest_context) const;
  // At the mean context, and as far towards the longest as uneven ones were found to go.
  template <typename At>
  double skewed(double mean_context, double longest_context, At at) const;

  OpTableSet of_;
};

}  // namespace understudy
