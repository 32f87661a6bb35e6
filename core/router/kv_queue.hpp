// Requests that wait in the router because all workers are busy.
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

// Follows Dynamo 1.6.1: a worker is busy with more than `queue_threshold` batches of prompt tokens to compute; a
// request waits while all are busy or others wait. Overlap is computed once, when the request arrives.
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

  // `cached_tokens`: the most that any worker holds of the prompt.
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

  Waiting pop() { return std::move(waiting_.extract(waiting_.begin()).value().waiting); }

  // Removes a cancelled request. False: it is not waiting.
  bool forget(std::uint64_t row) {
    return std::erase_if(waiting_, [row](const Entry& entry) { return entry.waiting.request.row == row; }) > 0;
  }

 private:
  // Highest first; equal ones in order of arrival.
  struct Entry {
    std::int64_t strict_priority;
    double score;
    std::uint64_t sequence;
    Waiting waiting;

    bool operator<(const Entry& other) const noexcept {
      return std::tie(other.strict_priority, other.score, sequence) < std::tie(strict_priority, score, other.sequence);
    }
  };

  const KvRouterConfig& config_;
  std::set<Entry> waiting_;
  std::uint64_t next_ = 0;
};

}  // namespace understudy
