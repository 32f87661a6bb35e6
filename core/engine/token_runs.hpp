// The steps in which one request got its tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/spares.hpp"

namespace understudy {

// Consecutive steps with tokens of one request.
struct TokenRun {
  std::uint64_t first_step;
  std::uint32_t count;
};

// Runs in order. Nearly always there is one, stored inline next to its request: every step extends it.
class TokenRuns {
 public:
  bool empty() const noexcept { return last_.count == 0; }
  std::size_t size() const noexcept { return empty() ? 0 : earlier_.size() + 1; }
  const TokenRun& front() const noexcept { return earlier_.empty() ? last_ : earlier_.front(); }
  const TokenRun& back() const noexcept { return last_; }
  const TokenRun& operator[](std::size_t i) const noexcept { return i < earlier_.size() ? earlier_[i] : last_; }

  // Append a token in each of `count` steps.
  void add(std::uint64_t first_step, std::uint32_t count) {
    if (count == 0) return;
    if (last_.first_step + last_.count != first_step || empty()) {
      if (earlier_.capacity() == 0 && !empty()) earlier_ = Spares<TokenRun>::take();
      if (!empty()) earlier_.push_back(last_);
      last_ = {first_step, 0};
    }
    last_.count += count;
  }
  // Recycle the memory of runs that are not needed any more.
  void give_back() { Spares<TokenRun>::keep(std::move(earlier_)); }

 private:
  TokenRun last_{0, 0};
  std::vector<TokenRun> earlier_;
};

}  // namespace understudy
