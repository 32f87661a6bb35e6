// The waiting requests of a scheduler: those that no schedule has skipped, and those that one has.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "engine/vllm/waiting_queue.hpp"

namespace understudy {

// A schedule skips a request whose adapter has no place in the batch, or whose blocks are being loaded. Until 0.30
// skipped requests have a queue of their own. Since 0.31 only those that hold blocks do (it is served first); others
// return to the front of the waiting queue.
class WaitingQueues {
 public:
  WaitingQueues(SchedulingPolicy policy, bool holders_first, const std::vector<EngineRequest>& requests)
      : policy_(policy),
        holders_first_(holders_first),
        requests_(requests),
        skipped_(policy, requests),
        waiting_(policy, requests) {}

  bool empty() const noexcept { return skipped_.empty() && waiting_.empty(); }
  std::size_t size() const noexcept { return skipped_.size() + waiting_.size(); }
  const WaitingQueue& skipped() const noexcept { return skipped_; }
  const WaitingQueue& waiting() const noexcept { return waiting_; }

  // Call `f` with every request, the skipped ones first, until it returns true.
  template <typename F>
  bool any_of(F f) const {
    return std::ranges::any_of(skipped_.ids(), f) || std::ranges::any_of(waiting_.ids(), f);
  }
  template <typename F>
  void for_each(F f) const {
    std::ranges::for_each(skipped_.ids(), f);
    std::ranges::for_each(waiting_.ids(), f);
  }
  // The next request to be tried, among those whose blocks are not being loaded.
  std::optional<RequestSlot> candidate() const {
    const auto ready = std::ranges::find_if(
        skipped_.ids(), [this](RequestSlot id) { return requests_[id].status != RequestStatus::Loading; });
    if (ready == skipped_.ids().end()) return waiting_.empty() ? std::nullopt : std::optional(waiting_.head());
    return !waiting_.empty() && before(waiting_.head(), *ready) ? waiting_.head() : *ready;
  }

  void push(RequestSlot id, bool preempted) { waiting_.push(id, preempted); }
  // Return a request that left the queues to be loaded to its place: ahead of all later arrivals.
  void resume(RequestSlot id) {
    const bool preempted = requests_[id].status == RequestStatus::Preempted;
    if (policy_ == SchedulingPolicy::Priority || preempted) return push(id, preempted);
    if (!holders_first_ && skipped_.insert_by_arrival(id)) return;
    if (!waiting_.insert_by_arrival(id)) push(id, false);
  }
  void remove(RequestSlot id) { (skipped_.contains(id) ? skipped_ : waiting_).remove(id); }

  // ── A schedule ──
  // The queue whose head is tried next; null: none. While no request is admitted that holds no blocks, the skipped one.
  WaitingQueue* next(bool admitting) {
    if (!admitting || waiting_.empty()) return skipped_.empty() ? nullptr : &skipped_;
    if (skipped_.empty()) return &waiting_;
    return before(waiting_.head(), skipped_.head()) ? &waiting_ : &skipped_;
  }
  // Leave the head of `queue` out of this schedule.
  void skip(WaitingQueue& queue) {
    passed_.push_back(queue.head());
    queue.pop();
  }
  // Return what this schedule has skipped to the queues. True: there was something.
  template <typename Holds>
  bool put_back(Holds holds) {
    if (passed_.empty()) return false;
    const auto others = std::stable_partition(passed_.begin(), passed_.end(),
                                              [&](RequestSlot id) { return !holders_first_ || holds(id); });
    skipped_.put_back({passed_.begin(), others});
    waiting_.put_back({others, passed_.end()});
    passed_.clear();
    return true;
  }

 private:
  // Whether the head of the waiting queue goes before one of the skipped queue.
  bool before(RequestSlot fresh, RequestSlot skipped) const {
    return policy_ == SchedulingPolicy::Priority && !holders_first_ && waiting_.before(fresh, skipped);
  }

  SchedulingPolicy policy_;
  bool holders_first_;
  const std::vector<EngineRequest>& requests_;
  WaitingQueue skipped_;
  WaitingQueue waiting_;
  std::vector<RequestSlot> passed_;  // by the current schedule
};

}  // namespace understudy
