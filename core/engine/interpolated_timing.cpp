#include "engine/interpolated_timing.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace understudy {

namespace {

// Where `x` lies: between axis[cell] and axis[cell + 1], at `part` of the way (outside 0..1 past the ends).
struct Position {
  std::size_t cell;
  double part;
};

Position locate(const std::vector<double>& axis, double x) {
  const auto above = std::upper_bound(axis.begin() + 1, axis.end() - 1, x);
  const auto cell = static_cast<std::size_t>(above - axis.begin()) - 1;
  return {cell, (x - axis[cell]) / (axis[cell + 1] - axis[cell])};
}

double between(double a, double b, double part) { return a + (b - a) * part; }

void check_axis(const std::vector<double>& axis, const char* name) {
  if (axis.size() < 2) throw Error(ErrorKind::ConfigError, name, " needs at least 2 points, has ", axis.size());
  for (std::size_t i = 0; i < axis.size(); ++i) {
    if (!std::isfinite(axis[i]) || (i > 0 && axis[i] <= axis[i - 1])) {
      throw Error(ErrorKind::ConfigError, name, " must be finite and rise strictly; point ", i, " is ", axis[i]);
    }
  }
}

void check_values(const std::vector<double>& values, std::size_t expected, const char* name) {
  if (values.size() != expected)
    throw Error(ErrorKind::ConfigError, name, " needs ", expected, " values, has ", values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]))
      throw Error(ErrorKind::ConfigError, name, " must be finite; value ", i, " is ", values[i]);
  }
}

}  // namespace

InterpolatedTiming::InterpolatedTiming(std::vector<double> prefill_isl, std::vector<double> prefill_ttft_ms,
                                       std::vector<double> decode_active_kv, std::vector<double> decode_context,
                                       std::vector<double> decode_itl_ms)
    : prefill_isl_(std::move(prefill_isl)),
      prefill_ttft_ms_(std::move(prefill_ttft_ms)),
      decode_active_kv_(std::move(decode_active_kv)),
      decode_context_(std::move(decode_context)),
      decode_itl_ms_(std::move(decode_itl_ms)) {
  check_axis(prefill_isl_, "prefill_isl");
  check_axis(decode_active_kv_, "decode_active_kv_tokens");
  check_axis(decode_context_, "decode_context_length");
  check_values(prefill_ttft_ms_, prefill_isl_.size(), "prefill_ttft_ms");
  check_values(decode_itl_ms_, decode_active_kv_.size() * decode_context_.size(), "decode_itl");
  const std::size_t columns = decode_context_.size();
  for (std::size_t i = 0; i < decode_itl_ms_.size(); ++i) {
    const bool rises = (i % columns == 0 || decode_itl_ms_[i] >= decode_itl_ms_[i - 1]) &&
                       (i < columns || decode_itl_ms_[i] >= decode_itl_ms_[i - columns]);
    rises_ = rises_ && rises;
  }
}

double InterpolatedTiming::prefill_ms(std::uint64_t requests, std::uint64_t mean_input,
                                      std::uint64_t mean_cached) const {
  const std::uint64_t tokens = requests * (mean_input - mean_cached);
  if (tokens == 0) return 0;
  const Position at = locate(prefill_isl_, static_cast<double>(tokens));
  return std::fmax(0.0, between(prefill_ttft_ms_[at.cell], prefill_ttft_ms_[at.cell + 1], at.part));
}

double InterpolatedTiming::drafts_ms(std::uint64_t drafts) const {
  const double per_token = (prefill_ttft_ms_[1] - prefill_ttft_ms_[0]) / (prefill_isl_[1] - prefill_isl_[0]);
  return std::fmax(0.0, per_token) * static_cast<double>(drafts);
}

double InterpolatedTiming::decode_ms(std::uint64_t, std::uint64_t context_tokens, std::uint64_t mean_context,
                                     std::uint64_t) const {
  const Position row = locate(decode_active_kv_, static_cast<double>(context_tokens));
  const Position column = locate(decode_context_, static_cast<double>(mean_context));
  const auto along = [&](std::size_t r) {
    const double* values = decode_itl_ms_.data() + r * decode_context_.size() + column.cell;
    return between(values[0], values[1], column.part);
  };
  return std::fmax(1.0, between(along(row.cell), along(row.cell + 1), row.part));
}

}  // namespace understudy
