// Requests that wait in front of a fleet whose workers all have enough to do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "router/kv_config.hpp"
#include "router/router.hpp"

namespace understudy {

// As in Dynamo 1.6.1: a worker is busy with more than `queue_threshold` of its batches of prompt tokens before it; a
// request waits while all are, or while others wait. What was cached where is remembered as of its arrival.
class KvQueue {
 public:
  struct Waiting {
    RouteRequest request;
    std::vector<std::uint64_t> prompt;
    std::vector<std::uint32_t> held;  // by worker and tier
    std::int64_t since_ns = 0;
  };

  explicit KvQueue(const KvRouterConfig& config) : config_(config) {}

  bool on() const noexcept { return config_.queue_threshold.has_value(); }
  bool empty() const noexcept { return waiting_.empty(); }
  std::size_t size() const noexcept { return waiting_.size(); }

  bool busy(std::uint64_t prefill_tokens, std::uint64_t batch_tokens) const noexcept {
    return static_cast<double>(prefill_tokens) > *config_.queue_threshold * static_cast<double>(batch_tokens);
  }

  // `cached_tokens`: the most that any worker holds of its prompt.
  void push(Waiting one, std::uint64_t cached_tokens) {
    const double jump = static_cast<double>(std::max<std::int64_t>(0, one.request.priority));
    const double arrival_s = static_cast<double>(one.since_ns) / 1e9;
    const std::uint64_t prompt = one.request.prompt_tokens;
    const std::uint64_t uncached = std::max<std::uint64_t>(1, prompt - std::min(cached_tokens, prompt));
    double score = 0;
    switch (config_.queue_order) {
      case RouterQueueOrder::Fcfs:
        score = jump - arrival_s;
        break;
      case RouterQueueOrder::Lcfs:
        score = jump + arrival_s;
        break;
      case RouterQueueOrder::Wspt:
        score = (1.0 + jump) / static_cast<double>(uncached);
        break;
    }
    waiting_.insert({one.request.strict_priority, score, next_++, std::move(one)});
  }

  Waiting pop() { return std::move(waiting_.extract(waiting_.begin()).value().what); }

  // The request has gone. False: it does not wait.
  bool forget(std::uint64_t row) {
    return std::erase_if(waiting_, [row](const Entry& entry) { return entry.what.request.row == row; }) > 0;
  }

 private:
  // The highest goes first; among equals the one that came first.
  struct Entry {
    std::int64_t strict_priority;
    double score;
    std::uint64_t sequence;
    Waiting what;

    bool operator<(const Entry& other) const noexcept {
      return std::tie(other.strict_priority, other.score, sequence) < std::tie(strict_priority, score, other.sequence);
    }
  };

  const KvRouterConfig& config_;
  std::set<Entry> waiting_;
  std::uint64_t next_ = 0;
};

}  // namespace understudy
