#include "engine/sglang/window_component.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

RadixNode* WindowComponent::match_end(std::span<RadixNode* const> walked) const {
  std::uint64_t behind = window_;  // nothing is missing before the first token
  RadixNode* end = nullptr;
  for (RadixNode* const node : walked) {
    behind = node->has_part ? std::min<std::uint64_t>(behind + node->length(), window_) : 0;
    if (node->has_part && behind >= window_) end = node;
  }
  return end;
}

std::uint32_t WindowComponent::matched(std::span<const RadixStep> walked) const {
  std::uint64_t behind = window_;
  std::uint32_t end = 0;
  for (const RadixStep& step : walked) {
    behind = step.node->has_part ? std::min<std::uint64_t>(behind + step.tokens, window_) : 0;
    if (step.node->has_part && behind >= window_) end = step.node->begin + step.tokens;
  }
  return end;
}

// The window up from the node becomes the most recently used, the node first of all.
void WindowComponent::on_matched(RadixNode& node) {
  std::vector<RadixNode*> used;
  std::uint64_t passed = 0;
  for (RadixNode* each = &node; each->parent != nullptr && passed < std::uint64_t{window_} + page_;
       each = each->parent) {
    if (each->has_part) used.push_back(each);
    passed += each->length();
  }
  for (auto each = used.rbegin(); each != used.rend(); ++each) move_to_front(**each);
}

void WindowComponent::on_split(RadixNode& upper, RadixNode& lower) {
  upper.part_lock = lower.part_lock;
  upper.part_mark = std::exchange(lower.part_mark, 0);
  upper.has_part = lower.has_part;
  if (upper.has_part) insert_before(upper, lower);
}

// A tombstone takes the request's window KV, as far as the request still has it.
std::uint32_t WindowComponent::on_covered(RadixNode& node, std::uint32_t live_from) {
  if (node.has_part) return node.end();
  const std::uint32_t live = std::max(node.begin, live_from);
  if (live >= node.end()) return node.end();
  if (live > node.begin) tree_.split(node, live - node.begin);
  give(node);
  return live;
}

// Parts the leaf, so that its last window can stay when the tokens before it are evicted.
void WindowComponent::on_leaf(RadixNode& leaf, std::uint32_t live_from) {
  const std::uint32_t live = std::max(leaf.begin, live_from);
  if (live >= leaf.end()) return;
  if (live > leaf.begin) tree_.split(leaf, live - leaf.begin);
  const std::uint32_t tail = (window_ + page_ - 1) / page_ * page_;
  if (leaf.length() > tail) give(*tree_.split(leaf, leaf.length() - tail));
  give(leaf);
}

bool WindowComponent::on_inserted(RadixNode& node, bool) {
  on_matched(node);
  return false;
}

void WindowComponent::lock(RadixLock& lock) {
  std::uint64_t covered = 0;
  for (RadixNode* node = lock.node; node->parent != nullptr && covered < window_; node = node->parent) {
    add_lock(*node);
    covered += node->length();
    if (covered < window_) continue;
    if (node->part_mark == 0) node->part_mark = ++marks_;
    lock.mark = node->part_mark;
  }
}

void WindowComponent::unlock(const RadixLock& lock) {
  if (lock.part_unlocked) return;
  for (RadixNode* node = lock.node; node->parent != nullptr; node = node->parent) {
    remove_lock(*node);
    if (lock.mark != 0 && node->part_mark == lock.mark) break;
  }
}

void WindowComponent::unlock_early(RadixLock& lock) {
  if (lock.node == nullptr || lock.part_unlocked || lock.mark == 0) return;
  unlock(lock);
  lock.part_unlocked = true;
}

}  // namespace understudy
