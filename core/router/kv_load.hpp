// The load of each worker as its router knows it: by what it sent there, and what it was told since.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "router/prefix_index.hpp"

namespace understudy {

class KvLoad {
 public:
  explicit KvLoad(std::size_t workers) : prefill_tokens_(workers, 0), requests_(workers, 0) {
    for (std::size_t worker = 0; worker < workers; ++worker) blocks_.join({worker, 0});
  }

  void add_worker() {
    blocks_.join({prefill_tokens_.size(), 0});
    prefill_tokens_.push_back(0);
    requests_.push_back(0);
  }

  // ── What happens to a request ──
  void book(std::uint64_t row, std::size_t worker, std::uint64_t prefill_tokens, std::vector<std::uint64_t> blocks) {
    Applied applied;
    blocks_.store(static_cast<PrefixIndex::Member>(worker), Tier::G1, blocks, 0, applied);
    prefill_tokens_[worker] += prefill_tokens;
    ++requests_[worker];
    live_[row] = {worker, prefill_tokens, std::move(blocks)};
  }
  void first_token(std::uint64_t row) {
    const auto at = live_.find(row);
    if (at == live_.end()) return;
    prefill_tokens_[at->second.worker] -= at->second.prefill_tokens;
    at->second.prefill_tokens = 0;
  }
  void ended(std::uint64_t row) {
    first_token(row);
    const auto at = live_.find(row);
    if (at == live_.end()) return;
    Applied applied;
    blocks_.remove(static_cast<PrefixIndex::Member>(at->second.worker), Tier::G1, at->second.blocks, applied);
    --requests_[at->second.worker];
    live_.erase(at);
  }

  // ── By worker ──
  // Tokens of prompts without a first token yet, that were not cached when they were sent.
  std::span<const std::uint64_t> prefill_tokens() const noexcept { return prefill_tokens_; }
  std::span<const std::uint64_t> requests() const noexcept { return requests_; }
  // Distinct full prompt blocks of its live requests.
  std::uint64_t blocks(std::size_t worker) const {
    return blocks_.blocks(static_cast<PrefixIndex::Member>(worker), Tier::G1);
  }
  // Leading blocks of a prompt that are among them, tier G1 of each worker's row.
  void shared(std::span<const std::uint64_t> prompt, std::vector<std::uint32_t>& out) const {
    blocks_.match(prompt, false, out);
  }
  bool empty() const noexcept { return live_.empty(); }

 private:
  struct Live {
    std::size_t worker;
    std::uint64_t prefill_tokens;
    std::vector<std::uint64_t> blocks;
  };

  std::vector<std::uint64_t> prefill_tokens_;
  std::vector<std::uint64_t> requests_;
  PrefixIndex blocks_{{}, true};
  std::unordered_map<std::uint64_t, Live> live_;
};

}  // namespace understudy
