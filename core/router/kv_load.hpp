// Load of each worker as its router knows it, from the requests that it sent and their progress.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/assert.hpp"
#include "router/live_prompts.hpp"

namespace understudy {

class KvLoad {
 public:
  void add_worker() {
    prompts_.add_worker();
    prefill_tokens_.push_back(0);
    requests_.push_back(0);
  }

  // ── Requests ──
  void add_request(std::uint64_t row, std::size_t worker, std::uint64_t prefill_tokens,
                   std::span<const std::uint64_t> blocks) {
    const LivePrompts::Node last = prompts_.enter(blocks, static_cast<std::uint32_t>(worker));
    prefill_tokens_[worker] += prefill_tokens;
    ++requests_[worker];
    live_[row] = {worker, prefill_tokens, last};
  }
  void first_token(std::uint64_t row) {
    const auto at = live_.find(row);
    if (at == live_.end()) return;
    std::uint64_t& tokens = prefill_tokens_[at->second.worker];
    UNDERSTUDY_ASSERT(tokens >= at->second.prefill_tokens, "prefill tokens of a worker fall below zero");
    tokens -= at->second.prefill_tokens;
    at->second.prefill_tokens = 0;
  }
  void ended(std::uint64_t row) {
    first_token(row);
    const auto at = live_.find(row);
    if (at == live_.end()) return;
    prompts_.leave(at->second.last, static_cast<std::uint32_t>(at->second.worker));
    UNDERSTUDY_ASSERT(requests_[at->second.worker] > 0, "requests of a worker fall below zero");
    --requests_[at->second.worker];
    live_.erase(at);
  }

  // ── By worker ──
  // Prompt tokens, not cached when sent, of requests without a first token.
  std::span<const std::uint64_t> prefill_tokens() const noexcept { return prefill_tokens_; }
  std::span<const std::uint64_t> requests() const noexcept { return requests_; }
  // Distinct full prompt blocks of its live requests.
  std::uint64_t blocks(std::size_t worker) const { return prompts_.blocks(worker); }
  // Leading blocks of a prompt that are among the live blocks of each worker.
  void shared(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const {
    prompts_.match(prompt, out);
  }
  bool empty() const noexcept { return live_.empty(); }

 private:
  struct Live {
    std::size_t worker;
    std::uint64_t prefill_tokens;
    LivePrompts::Node last;
  };

  std::vector<std::uint64_t> prefill_tokens_;
  std::vector<std::uint64_t> requests_;
  LivePrompts prompts_;
  std::unordered_map<std::uint64_t, Live> live_;
};

}  // namespace understudy
