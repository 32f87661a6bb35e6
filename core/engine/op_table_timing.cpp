#include "engine/op_table_timing.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace understudy {

OpTable::OpTable(std::string name, std::vector<Axis> axes, std::vector<double> us, bool extrapolate)
    : name_(std::move(name)), axes_(std::move(axes)), us_(std::move(us)), extrapolate_(extrapolate) {
  std::size_t points = 1;
  for (const Axis& axis : axes_) {
    if (axis.at.empty() || std::ranges::adjacent_find(axis.at, std::greater_equal<>()) != axis.at.end()) {
      throw Error(ErrorKind::ConfigError, "op tables: ", name_, " needs points of ", axis.name, ", rising");
    }
    points *= axis.at.size();
  }
  if (axes_.empty() || axes_.size() > kMostAxes || points != us_.size()) {
    throw Error(ErrorKind::ConfigError, "op tables: ", name_, " has ", us_.size(), " times for ", points, " points");
  }
}

double OpTable::us(std::span<const double> values) const {
  // Corners of the cell that contains the point, with their weights; corners of weight zero may be holes.
  std::array<std::pair<std::size_t, double>, 1 << kMostAxes> corners{};
  std::size_t count = 1;
  corners[0] = {0, 1.0};
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    const std::vector<double>& at = axes_[i].at;
    const double value = values[i];
    if (value > at.back() && !extrapolate_) refuse_beyond(axes_[i], value);
    std::size_t low = 0;
    double share = 0;
    if (at.size() > 1) {
      const auto above = static_cast<std::size_t>(std::ranges::upper_bound(at, value) - at.begin());
      const std::size_t high = std::min(std::max<std::size_t>(above, 1), at.size() - 1);
      low = high - 1;
      share = std::max((value - at[low]) / (at[high] - at[low]), 0.0);
    }
    std::size_t next = 0;
    std::array<std::pair<std::size_t, double>, 1 << kMostAxes> finer{};
    for (std::size_t corner = 0; corner < count; ++corner) {
      const auto [index, weight] = corners[corner];
      if (share != 1) finer[next++] = {index * at.size() + low, weight * (1 - share)};
      if (share != 0) finer[next++] = {index * at.size() + low + 1, weight * share};
    }
    corners = finer;
    count = next;
  }
  double total = 0;
  for (std::size_t corner = 0; corner < count; ++corner) total += corners[corner].second * us_[corners[corner].first];
  if (std::isnan(total)) refuse_hole(values);
  return std::max(total, 0.0);
}

void OpTable::refuse_beyond(const Axis& axis, double value) const {
  const std::string which = axes_.size() == 1 ? "" : axis.name + "=";
  throw Error(ErrorKind::ConfigError, "op tables: ", name_, " ends at ", which, axis.at.back(), ", a step has ", value,
              "; extrapolate, or measure further");
}

void OpTable::refuse_hole(std::span<const double> values) const {
  std::string where;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    where += text_of(i == 0 ? "" : ", ", axes_[i].name, "=", values[i]);
  }
  throw Error(ErrorKind::ConfigError, "op tables: ", name_, " has no point near ", where);
}

OpTableTiming::OpTableTiming(OpTableSet tables) : of_(std::move(tables)) {
  for (const double number : {of_.layers, of_.skew, of_.comm_ms, of_.comm_token_ms, of_.comm_rank_token_ms}) {
    if (!std::isfinite(number) || number < 0) {
      throw Error(ErrorKind::ConfigError, "op tables: numbers must be finite and not negative, got ", number);
    }
  }
}

double OpTableTiming::step_ms(const StepLoad& load, std::uint64_t, const Speedups& speedups) const {
  const std::uint64_t of_all_ranks = load.rank_tokens == 0 ? load.tokens * of_.ranks : load.rank_tokens;
  const std::uint64_t tokens = std::max(load.tokens, load.rank_width);
  return whole_ms(tokens, load.requests + load.drafts, of_all_ranks, attention_us(load)) / speedups.all;
}

double OpTableTiming::decode_step_ms(const DecodeLoad& load, std::uint64_t, const Speedups& speedups) const {
  const auto requests = static_cast<double>(load.requests);
  const double attention = load.requests == 0
                               ? 0
                               : decodes_us(requests, static_cast<double>(load.context_tokens) / requests,
                                            static_cast<double>(load.longest_context));
  return whole_ms(load.requests, load.requests, load.requests * of_.ranks, attention) / speedups.all;
}

double OpTableTiming::whole_ms(std::uint64_t tokens, std::uint64_t rows, std::uint64_t rank_tokens,
                               double attention_us) const {
  const auto graph = std::ranges::lower_bound(of_.captures, tokens);
  const auto wide = static_cast<double>(graph == of_.captures.end() ? tokens : *graph);
  const auto all = static_cast<double>(rank_tokens);
  double layer = of_.layer.us(wide) + attention_us;
  if (of_.experts) layer += of_.experts->us(all);
  const double kernels = of_.layers * layer + of_.once.us(wide) + of_.head.us(static_cast<double>(rows));
  return kernels * 1e-3 + of_.comm_ms + of_.comm_token_ms * wide + of_.comm_rank_token_ms * all;
}

// Attention time of a layer. Each prompt attends to itself alone; decodes add their extra time to that of all prompts.
double OpTableTiming::attention_us(const StepLoad& load) const {
  double total = 0;
  double fresh = 0;
  double behind = 0;
  for (const PrefillChunk& chunk : load.chunks) {
    const std::array at{static_cast<double>(chunk.tokens), static_cast<double>(chunk.history)};
    total += of_.prompts.us(at);
    fresh += at[0];
    behind += at[0] * at[1];
  }
  if (load.decodes == 0) return total;
  const auto requests = static_cast<double>(load.decodes);
  const double mean = static_cast<double>(load.context_tokens) / requests;
  const auto longest = static_cast<double>(load.longest_context);
  if (load.chunks.empty()) return decodes_us(requests, mean, longest);
  const double history = behind / fresh;
  const double together = skewed(
      mean, longest, [&](double context) { return of_.mixed.us(std::array{fresh, history, requests, context}); });
  return total + std::max(together - of_.prompts.us(std::array{fresh, history}), 0.0);
}

double OpTableTiming::decodes_us(double requests, double mean_context, double longest_context) const {
  return skewed(mean_context, longest_context,
                [&](double context) { return of_.decodes.us(std::array{requests, context}); });
}

template <typename At>
double OpTableTiming::skewed(double mean_context, double longest_context, At at) const {
  const double at_mean = at(mean_context);
  if (of_.skew == 0 || longest_context <= mean_context) return at_mean;
  return at_mean + of_.skew * (at(longest_context) - at_mean);
}

}  // namespace understudy
