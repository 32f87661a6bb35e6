// The order of the waiting queue: by arrival, cached prefix, weight in the tree, length or priority.
#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

namespace {

constexpr std::size_t kMostMatched = 128;    // waiting requests
constexpr std::uint64_t kRefreshEvery = 32;  // passes

}  // namespace

void SglangScheduler::order_queue() {
  const auto longest_first = [](const SglangRequest* one) { return -static_cast<std::int64_t>(one->max_new); };
  bool matched = false;
  if (settings_.enable_priority_scheduling) {
    if (settings_.schedule_policy == SglangPolicy::Lof) {
      std::ranges::stable_sort(waiting_, {}, [&](const SglangRequest* one) {
        return std::pair(one->priority * sign(), longest_first(one));
      });
    } else {
      std::ranges::stable_sort(
          waiting_, {}, [this](const SglangRequest* one) { return std::pair(one->priority * sign(), one->entered); });
    }
  } else if (settings_.schedule_policy == SglangPolicy::Lof) {
    std::ranges::stable_sort(waiting_, {}, longest_first);
  } else if (settings_.schedule_policy != SglangPolicy::Fcfs && has_cache()) {
    matched = order_by_prefix();
  }
  if (!matched) refresh_waiting();
}

// False: the queue is too long, and stays as it is.
bool SglangScheduler::order_by_prefix() {
  const bool by_weight = settings_.schedule_policy == SglangPolicy::DfsWeight;
  if (!by_weight && waiting_.size() > kMostMatched) return false;
  std::vector<RadixNode*> nodes;
  std::vector<std::int64_t> found;
  std::vector<const SglangRequest*> noted;
  std::vector<bool> late;
  for (SglangRequest* const request : waiting_) {
    const RadixMatch match = tree_.match(request->tokens, request->size());
    nodes.push_back(match.node);
    request->matched_tokens = request->size();
    request->matched_prefix = match.tokens;
    found.push_back(
        std::min<std::int64_t>(match.tokens + match.host_tokens, static_cast<std::int64_t>(request->size()) - 1));
    late.push_back(false);
    if (by_weight || match.tokens > settings_.in_batch_check_threshold) continue;
    const std::int64_t least = settings_.in_batch_deprioritize_threshold;
    late.back() = least <= 0 || std::ranges::any_of(noted, [&](const SglangRequest* other) {
                    return request->tokens.common(0, other->tokens, request->size()) >= least;
                  });
    if (!late.back()) noted.push_back(request);
  }
  if (by_weight) {
    order_by_weight(nodes);
    return true;
  }
  std::vector<std::size_t> order(waiting_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {},
                           [&](std::size_t i) { return std::pair(late[i] ? 1 : 0, late[i] ? 0 : -found[i]); });
  std::vector<SglangRequest*> sorted;
  for (const std::size_t i : order) sorted.push_back(waiting_[i]);
  waiting_ = std::move(sorted);
  return true;
}

// Depth first, heavier subtrees first; the weight of a node is the number of requests whose match ended below it.
void SglangScheduler::order_by_weight(const std::vector<RadixNode*>& nodes) {
  std::unordered_map<const RadixNode*, std::size_t> weight;
  std::unordered_map<const RadixNode*, std::vector<SglangRequest*>> own;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    own[nodes[i]].push_back(waiting_[i]);
    for (const RadixNode* node = nodes[i]; node != nullptr; node = node->parent) ++weight[node];
  }
  std::vector<SglangRequest*> sorted;
  const std::function<void(const RadixNode*)> visit = [&](const RadixNode* node) {
    std::vector<const RadixNode*> children;
    for (const auto& [key, child] : node->children) {
      if (weight.contains(child)) children.push_back(child);
    }
    std::ranges::sort(children, {}, [&](const RadixNode* child) {
      return std::pair(-static_cast<std::int64_t>(weight[child]), child->place);
    });
    for (const RadixNode* const child : children) visit(child);
    const auto here = own.find(node);
    if (here != own.end()) sorted.insert(sorted.end(), here->second.begin(), here->second.end());
  };
  visit(tree_.root());
  waiting_ = std::move(sorted);
}

// Now and then the first waiting requests refresh what they would find.
void SglangScheduler::refresh_waiting() {
  if (settings_.radix_eviction_policy != RadixEviction::Lru || !has_cache() || waiting_.empty()) return;
  if (refreshes_++ % kRefreshEvery != 0) return;
  const std::size_t most = std::min(waiting_.size(), kMostMatched);
  for (std::size_t i = most; i > 0; --i) {
    SglangRequest* const request = waiting_[i - 1];
    const RadixMatch match = tree_.match(request->tokens, request->size());
    request->matched_tokens = request->size();
    request->matched_prefix = match.tokens;
  }
}

}  // namespace understudy
