// Prefixes of sleeping sessions whose blocks an engine references.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/prefix_keeper.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

class HeldPrefixes {
 public:
  bool empty() const noexcept { return held_.empty(); }
  std::uint64_t blocks() const noexcept { return blocks_; }  // references; a shared block counts for each hold

  void add(std::uint64_t session, KvRequest prefix, std::size_t blocks, std::int64_t now_ns) {
    integrate(now_ns);
    held_.push_back({session, blocks, std::move(prefix)});
    blocks_ += blocks;
    ++totals.holds;
    totals.held_blocks += blocks;
    totals.peak_held_blocks = std::max(totals.peak_held_blocks, blocks_);
  }
  // The prefix of a session, for its release; nothing if it has none.
  std::optional<KvRequest> take(std::uint64_t session, std::int64_t now_ns) {
    const auto found = std::ranges::find(held_, session, &Held::session);
    if (found == held_.end()) return std::nullopt;
    return take(found, now_ns);
  }
  std::optional<KvRequest> take_oldest(std::int64_t now_ns) {
    if (held_.empty()) return std::nullopt;
    ++totals.yielded_holds;
    return take(held_.begin(), now_ns);
  }
  PrefixTotals totals_at(std::int64_t now_ns) const {
    PrefixTotals at = totals;
    at.held_block_s += seconds_since(now_ns) * static_cast<double>(blocks_);
    return at;
  }

  PrefixTotals totals;

 private:
  struct Held {
    std::uint64_t session = 0;
    std::size_t blocks = 0;
    KvRequest prefix;
  };

  double seconds_since(std::int64_t now_ns) const {
    return now_ns > since_ns_ ? static_cast<double>(now_ns - since_ns_) / 1e9 : 0;
  }
  void integrate(std::int64_t now_ns) {
    totals.held_block_s += seconds_since(now_ns) * static_cast<double>(blocks_);
    since_ns_ = std::max(since_ns_, now_ns);
  }
  KvRequest take(std::vector<Held>::iterator at, std::int64_t now_ns) {
    integrate(now_ns);
    KvRequest prefix = std::move(at->prefix);
    blocks_ -= at->blocks;
    held_.erase(at);
    return prefix;
  }

  std::vector<Held> held_;  // the oldest first
  std::uint64_t blocks_ = 0;
  std::int64_t since_ns_ = 0;
};

}  // namespace understudy
