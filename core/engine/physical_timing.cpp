#include "engine/physical_timing.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

namespace understudy {

namespace {

constexpr std::uint64_t kUsualRequests = 1024;
constexpr std::uint64_t kLargestGraph = 1 << 20;

using Number = double StepCoefficients::*;

constexpr std::pair<std::string_view, Number> kNumbers[] = {
    {"weights_ms", &StepCoefficients::weights_ms},
    {"token_ms", &StepCoefficients::token_ms},
    {"expert_ms", &StepCoefficients::expert_ms},
    {"local_experts", &StepCoefficients::local_experts},
    {"expert_share", &StepCoefficients::expert_share},
    {"expert_spread", &StepCoefficients::expert_spread},
    {"draft_novelty", &StepCoefficients::draft_novelty},
    {"expert_token_ms", &StepCoefficients::expert_token_ms},
    {"head_ms", &StepCoefficients::head_ms},
    {"head_sequence_ms", &StepCoefficients::head_sequence_ms},
    {"context_ms", &StepCoefficients::context_ms},
    {"window_context_ms", &StepCoefficients::window_context_ms},
    {"mix", &StepCoefficients::mix},
    {"attention_ms", &StepCoefficients::attention_ms},
    {"window_attention_ms", &StepCoefficients::window_attention_ms},
    {"draft_attention_ms", &StepCoefficients::draft_attention_ms},
    {"history_ms", &StepCoefficients::history_ms},
    {"comm_ms", &StepCoefficients::comm_ms},
    {"comm_token_ms", &StepCoefficients::comm_token_ms},
    {"comm_rank_token_ms", &StepCoefficients::comm_rank_token_ms},
    {"step_ms", &StepCoefficients::step_ms},
    {"sequence_ms", &StepCoefficients::sequence_ms},
    {"prefill_ms", &StepCoefficients::prefill_ms},
    {"floor_ms", &StepCoefficients::floor_ms},
    {"softness", &StepCoefficients::softness},
};

void check(const StepCoefficients& c) {
  for (const auto& [name, number] : kNumbers) {
    if (!std::isfinite(c.*number) || c.*number < 0) {
      throw Error(ErrorKind::ConfigError, name, " must be finite and not negative, got ", c.*number);
    }
  }
  if (c.expert_share > 1) throw Error(ErrorKind::ConfigError, "expert_share must be in [0, 1], got ", c.expert_share);
  if (c.draft_novelty > 1) {
    throw Error(ErrorKind::ConfigError, "draft_novelty must be in [0, 1], got ", c.draft_novelty);
  }
  if (c.ranks < 1) throw Error(ErrorKind::ConfigError, "ranks must be at least 1, got ", c.ranks);
  if (c.mix < 1) throw Error(ErrorKind::ConfigError, "mix must be at least 1, got ", c.mix);
  if (c.softness < 1) throw Error(ErrorKind::ConfigError, "softness must be at least 1, got ", c.softness);
  if (c.window == 0 && (c.window_context_ms > 0 || c.window_attention_ms > 0)) {
    throw Error(ErrorKind::ConfigError, "window_context_ms and window_attention_ms need window, the size of it");
  }
  for (std::size_t i = 0; i < c.captures.size(); ++i) {
    if (c.captures[i] == 0 || c.captures[i] > kLargestGraph || (i > 0 && c.captures[i] <= c.captures[i - 1])) {
      throw Error(ErrorKind::ConfigError, "captures must rise strictly from at least 1 to at most ", kLargestGraph,
                  "; number ", i, " is ", c.captures[i]);
    }
  }
}

// By squaring, which is the same to the last digit on every machine.
double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) result *= base;
  }
  return result;
}

// Cube root of a³ + b³, by Newton's method: the same to the last digit on every machine.
double soft_cubes(double a, double b) {
  const double larger = std::fmax(a, b);
  if (larger <= 0) return 0;
  const double ratio = std::fmin(a, b) / larger;
  const double cubes = 1 + ratio * ratio * ratio;
  double root = 1 + 0.26 * (cubes - 1);
  for (int i = 0; i < 5; ++i) root = (2 * root + cubes / (root * root)) / 3;
  return larger * root;
}

// Sum of what each new token of a chunk attends to: the tokens before it and half of itself, up to `window` of them.
double attended(const PrefillChunk& chunk, std::uint64_t window) {
  const std::uint64_t c = chunk.tokens;
  const std::uint64_t h = chunk.history;
  const std::uint64_t rising = h >= window ? 0 : std::min(c, window - h);
  return static_cast<double>(rising * (2 * h + rising)) * 0.5 +
         (c > rising ? static_cast<double>(c - rising) * static_cast<double>(window) : 0);
}

}  // namespace

void StepCoefficients::set(std::string_view name, double value) {
  const auto* found = std::ranges::find(kNumbers, name, &std::pair<std::string_view, Number>::first);
  if (found == std::end(kNumbers)) throw Error(ErrorKind::ConfigError, name, " is no number of a step");
  this->*found->second = value;
}

PhysicalTiming::PhysicalTiming(StepCoefficients coefficients, TimingDomain domain)
    : of_(std::move(coefficients)), domain_(domain) {
  check(of_);
  for (const std::uint64_t size : of_.captures) padded_.resize(size + 1, size);
  if (!padded_.empty()) padded_[0] = 0;
  decode_base_ms_.reserve(kUsualRequests + 1);
  for (std::uint64_t n = 0; n <= kUsualRequests; ++n) decode_base_ms_.push_back(base_ms(n, n, n, n * of_.ranks));
}

double PhysicalTiming::step_ms(const StepLoad& load, std::uint64_t capacity_tokens, const Speedups& speedups) const {
  if (load.only_decodes() && load.rank_tokens == 0) {
    return decode_step_ms(load.as_decodes(), capacity_tokens, speedups);
  }
  double attention = 0;
  double window_attention = 0;
  std::uint64_t history = 0;
  for (const PrefillChunk& chunk : load.chunks) {
    history += chunk.history;
    attention += attended(chunk, kNoWindow);
    if (of_.window > 0) window_attention += attended(chunk, of_.window);
  }
  // Other ranks are taken to have as many drafts among their tokens.
  const std::uint64_t all = of_all_ranks(load);
  const std::uint64_t drafts = load.tokens == 0 ? 0 : load.drafts * all / load.tokens;
  double ms = base_ms(std::max(load.tokens, load.rank_width), load.requests, load.requests + load.drafts, all, drafts);
  const double context = decodes_ms(load);
  if (load.chunks.empty()) return (ms + context) / speedups.all;
  ms += context * of_.mix + of_.attention_ms * attention + of_.window_attention_ms * window_attention + of_.prefill_ms;
  ms += of_.history_ms * static_cast<double>(history);
  if (load.tokens > of_.floor_above) ms = std::fmax(ms, of_.floor_ms);
  return ms / speedups.all;
}

double PhysicalTiming::decode_step_ms(const DecodeLoad& load, std::uint64_t, const Speedups& speedups) const {
  const std::uint64_t n = load.requests;
  const double base = n < decode_base_ms_.size() ? decode_base_ms_[n] : base_ms(n, n, n, n * of_.ranks);
  return (base + context_ms(load.context_tokens, load.windowed_context)) / speedups.all;
}

double PhysicalTiming::least_ms(const DecodeLoad& load, std::uint64_t, std::uint64_t capacity_tokens,
                                const Speedups& speedups) const {
  return decode_step_ms(load, capacity_tokens, speedups);
}

bool PhysicalTiming::covers(const DecodeLoad& load) const noexcept {
  return load.requests <= domain_.tokens && load.requests <= domain_.requests &&
         load.context_tokens <= domain_.context_tokens;
}

bool PhysicalTiming::covers(const StepLoad& load) const noexcept {
  if (load.tokens > domain_.tokens || load.requests > domain_.requests ||
      load.context_tokens > domain_.context_tokens) {
    return false;
  }
  return std::ranges::all_of(load.chunks, [this](const PrefillChunk& chunk) {
    return std::uint64_t{chunk.history} + chunk.tokens <= domain_.prompt_tokens;
  });
}

double PhysicalTiming::base_ms(std::uint64_t tokens, std::uint64_t sequences, std::uint64_t rows,
                               std::uint64_t rank_tokens, std::uint64_t drafts) const {
  const auto wide = static_cast<double>(padded(tokens));
  const auto all = static_cast<double>(rank_tokens);
  const double linear = soft(of_.weights_ms, of_.token_ms * wide);
  const double head = soft(of_.head_ms, of_.head_sequence_ms * static_cast<double>(rows));
  const double comm = of_.comm_ms + of_.comm_token_ms * wide + of_.comm_rank_token_ms * all;
  double experts = 0;
  if (of_.local_experts > 0) {
    const auto familiar = static_cast<std::uint64_t>((1 - of_.draft_novelty) * static_cast<double>(drafts));
    experts = experts_ms(rank_tokens, familiar);
  }
  return linear + experts + head + comm + of_.step_ms + of_.sequence_ms * static_cast<double>(sequences);
}

// Experts that are placed whole wait for the group with the most of them to read and the most tokens to compute. Tokens
// choose independently, so both are about normal; the excess of the largest of them is `expert_spread` deviations.
double PhysicalTiming::experts_ms(std::uint64_t rank_tokens, std::uint64_t familiar) const {
  const double share = 1 - power(1 - of_.expert_share, rank_tokens - familiar);
  double read = of_.local_experts * share;
  auto tokens = static_cast<double>(rank_tokens);
  if (of_.expert_spread > 0 && of_.expert_share > 0) {
    read = std::fmin(read + of_.expert_spread * std::sqrt(read * (1 - share)), of_.local_experts);
    tokens += of_.expert_spread * std::sqrt(tokens / (of_.expert_share * of_.local_experts));
  }
  return soft(of_.expert_ms * read, of_.expert_token_ms * tokens);
}

double PhysicalTiming::decodes_ms(const StepLoad& load) const {
  const double context = context_ms(load.context_tokens, load.windowed_context);
  if (load.draft_pairs == 0) return context;
  const double pair = of_.draft_attention_ms > 0 ? of_.draft_attention_ms : of_.attention_ms;
  const double pairs = pair * static_cast<double>(load.draft_pairs);
  const double window_pairs = of_.window_attention_ms * static_cast<double>(load.window_pairs);
  return soft(context, pairs + window_pairs);
}

double PhysicalTiming::context_ms(std::uint64_t context, std::uint64_t windowed) const {
  const double ms = of_.context_ms * static_cast<double>(context);
  return of_.window == 0 ? ms : ms + of_.window_context_ms * static_cast<double>(windowed);
}

double PhysicalTiming::soft(double a, double b) const {
  if (of_.softness == 2) return std::sqrt(a * a + b * b);
  if (of_.softness == 3) return soft_cubes(a, b);
  return std::pow(std::pow(a, of_.softness) + std::pow(b, of_.softness), 1 / of_.softness);
}

std::uint64_t PhysicalTiming::padded(std::uint64_t tokens) const {
  return tokens < padded_.size() ? padded_[tokens] : tokens;
}

}  // namespace understudy
