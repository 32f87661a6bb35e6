// How many tokens a decode step yields when a draft of several is verified at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/errors.hpp"

namespace understudy {

// One token is certain; draft token i is accepted with probability rates[i] if all before it were. The generator is
// SplitMix64, so that a stream is the same everywhere.
class BurstSampler {
 public:
  BurstSampler(std::vector<double> rates, std::uint64_t seed) : rates_(std::move(rates)), state_(seed) {
    for (std::size_t i = 0; i < rates_.size(); ++i) {
      if (!(rates_[i] >= 0 && rates_[i] <= 1)) {
        throw Error(ErrorKind::ConfigError, "accept_rates[", i, "] must be in [0, 1], got ", rates_[i]);
      }
    }
  }

  bool on() const noexcept { return !rates_.empty(); }
  std::uint32_t longest() const noexcept { return static_cast<std::uint32_t>(rates_.size()) + 1; }

  // How many of the first `drafts` are accepted.
  std::uint32_t accept(std::uint32_t drafts) noexcept {
    std::uint32_t accepted = 0;
    while (accepted < std::min<std::size_t>(drafts, rates_.size()) && uniform() < rates_[accepted]) ++accepted;
    return accepted;
  }

  // Tokens of one step for a request that may still get `remaining`.
  std::uint32_t draw(std::uint32_t remaining) noexcept {
    if (remaining == 0) return 0;
    std::uint32_t tokens = 1;
    for (const double rate : rates_) {
      if (uniform() >= rate) break;
      ++tokens;
    }
    return std::min(tokens, remaining);
  }

 private:
  double uniform() noexcept {  // in [0, 1), 53 bits
    state_ += 0x9E3779B97F4A7C15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return static_cast<double>(z >> 11) * 0x1p-53;
  }

  std::vector<double> rates_;
  std::uint64_t state_;
};

}  // namespace understudy
