// Requests that wait for admission, in the order in which they will be tried.
#pragma once

#include <algorithm>
#include <deque>
#include <span>
#include <tuple>
#include <vector>

#include "engine/request.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/live_request.hpp"

namespace understudy {

class WaitingQueue {
 public:
  WaitingQueue(SchedulingPolicy policy, const std::vector<EngineRequest>& requests)
      : policy_(policy), requests_(requests) {}

  bool empty() const noexcept { return ids_.empty(); }
  std::size_t size() const noexcept { return ids_.size(); }
  RequestSlot head() const noexcept { return ids_.front(); }
  const std::deque<RequestSlot>& ids() const noexcept { return ids_; }
  bool contains(RequestSlot id) const { return std::ranges::find(ids_, id) != ids_.end(); }

  // A preempted request returns to the front, unless priorities decide.
  void push(RequestSlot id, bool preempted) {
    if (policy_ == SchedulingPolicy::Priority) {
      ids_.insert(std::ranges::upper_bound(ids_, id, [this](RequestSlot a, RequestSlot b) { return before(a, b); }),
                  id);
    } else if (preempted) {
      ids_.push_front(id);
    } else {
      ids_.push_back(id);
    }
  }
  // Insert the request ahead of all later arrivals. False: there is none.
  bool insert_by_arrival(RequestSlot id) {
    const auto later = std::ranges::find_if(ids_, [&](RequestSlot other) {
      return requests_[other].status != RequestStatus::Preempted && requests_[other].id > requests_[id].id;
    });
    if (later == ids_.end()) return false;
    ids_.insert(later, id);
    return true;
  }
  // Put skipped requests back in front, in their old order.
  void put_back(std::span<const RequestSlot> skipped) {
    if (policy_ != SchedulingPolicy::Priority) {
      ids_.insert(ids_.begin(), skipped.begin(), skipped.end());
      return;
    }
    for (const RequestSlot id : skipped) push(id, false);
  }
  void pop() { ids_.pop_front(); }
  void remove(RequestSlot id) { ids_.erase(std::ranges::find(ids_, id)); }

  // Whether `a` is tried before `b` where priorities decide.
  bool before(RequestSlot a, RequestSlot b) const {
    const RequestSpec& x = requests_[a].spec;
    const RequestSpec& y = requests_[b].spec;
    return std::tie(x.priority, x.arrival_time, x.name) < std::tie(y.priority, y.arrival_time, y.name);
  }

 private:
  SchedulingPolicy policy_;
  const std::vector<EngineRequest>& requests_;
  std::deque<RequestSlot> ids_;
};

}  // namespace understudy
