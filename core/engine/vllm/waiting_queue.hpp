// Requests that wait for admission, in the order in which they will be tried.
#pragma once

#include <algorithm>
#include <deque>
#include <span>
#include <tuple>
#include <vector>

#include "engine/request.hpp"
#include "engine/vllm/config.hpp"

namespace understudy {

class WaitingQueue {
 public:
  WaitingQueue(const VllmConfig& config, const std::vector<EngineRequest>& requests)
      : policy_(config.policy), preempted_first_(config.preempted_first), requests_(requests) {}

  bool empty() const noexcept { return ids_.empty(); }
  std::size_t size() const noexcept { return ids_.size(); }
  RequestSlot head() const noexcept { return ids_.front(); }
  const std::deque<RequestSlot>& ids() const noexcept { return ids_; }

  // A preempted request returns to the front, unless priorities decide.
  void push(RequestSlot id, bool preempted) {
    if (policy_ == SchedulingPolicy::Priority) {
      ids_.insert(
          std::upper_bound(ids_.begin(), ids_.end(), id, [this](RequestSlot a, RequestSlot b) { return before(a, b); }),
          id);
    } else if (preempted) {
      ids_.insert(std::find_if(ids_.begin(), ids_.end(),
                               [this](RequestSlot other) { return preempted_first_ || !requests_[other].passed_over; }),
                  id);
    } else {
      ids_.push_back(id);
    }
  }
  // Return a request that left the queue to be loaded to its place: ahead of all later arrivals.
  void resume(RequestSlot id, bool preempted) {
    if (policy_ == SchedulingPolicy::Priority || preempted) return push(id, preempted);
    ids_.insert(std::find_if(ids_.begin(), ids_.end(),
                             [&](RequestSlot other) {
                               return requests_[other].status != RequestStatus::Preempted &&
                                      requests_[other].id > requests_[id].id;
                             }),
                id);
  }
  // Put requests that were passed over back in front, in the old order.
  void put_back(std::span<const RequestSlot> passed) {
    if (policy_ != SchedulingPolicy::Priority) {
      ids_.insert(ids_.begin(), passed.begin(), passed.end());
      return;
    }
    for (const RequestSlot id : passed) push(id, false);
  }
  bool contains(RequestSlot id) const { return std::find(ids_.begin(), ids_.end(), id) != ids_.end(); }
  void pop() { ids_.pop_front(); }
  // Put a request that was passed over back in front.
  void put_back(RequestSlot id) {
    if (policy_ == SchedulingPolicy::Priority) return push(id, false);
    ids_.push_front(id);
  }
  void remove(RequestSlot id) { ids_.erase(std::find(ids_.begin(), ids_.end(), id)); }

  // Whether `a` is tried before `b` where priorities decide.
  bool before(RequestSlot a, RequestSlot b) const {
    const RequestSpec& x = requests_[a].spec;
    const RequestSpec& y = requests_[b].spec;
    return std::tie(x.priority, x.arrival_time, x.name) < std::tie(y.priority, y.arrival_time, y.name);
  }

 private:
  SchedulingPolicy policy_;
  bool preempted_first_;
  const std::vector<EngineRequest>& requests_;
  std::deque<RequestSlot> ids_;
};

}  // namespace understudy
