#include "engine/sglang/state_component.hpp"

#include <algorithm>

namespace understudy {

RadixNode* StateComponent::match_end(std::span<RadixNode* const> walked) const {
  const auto last = std::find_if(walked.rbegin(), walked.rend(), [](const RadixNode* node) { return node->has_part; });
  return last == walked.rend() ? nullptr : *last;
}

// The state of a node that is only begun is not on its way.
std::uint32_t StateComponent::matched(std::span<const RadixStep> walked) const {
  std::uint32_t end = 0;
  for (const RadixStep& step : walked) {
    if (step.node->has_part && step.tokens == step.node->length()) end = step.node->end();
  }
  return end;
}

bool StateComponent::on_inserted(RadixNode& node, bool is_leaf) {
  const bool takes = !node.has_part;
  if (takes) {
    give(node);
  } else {
    move_to_front(node);
  }
  if (!is_leaf) tree_.touch(node);
  if (takes) cap_path(node);
  return takes;
}

// Drops the shallowest states of a path that has too many, where no request holds them and no other path joins.
void StateComponent::cap_path(RadixNode& end) {
  if (most_per_path_ < 0) return;
  std::vector<RadixNode*> states;
  for (RadixNode* node = &end; node->parent != nullptr; node = node->parent) {
    if (node->has_part) states.push_back(node);
  }
  auto over = static_cast<std::int64_t>(states.size()) - most_per_path_;
  for (auto node = states.rbegin(); node != states.rend() && over > 0 && *node != &end; ++node) {
    if ((*node)->part_lock > 0 || (*node)->children.size() != 1) continue;
    drop(**node);
    --over;
  }
}

void StateComponent::lock(RadixLock& lock) {
  if (lock.node->parent != nullptr) add_lock(*lock.node);
}

void StateComponent::unlock(const RadixLock& lock) {
  if (!lock.part_unlocked && lock.node->parent != nullptr) remove_lock(*lock.node);
}

void StateComponent::unlock_early(RadixLock& lock) {
  if (lock.node == nullptr || lock.part_unlocked) return;
  unlock(lock);
  lock.part_unlocked = true;
}

}  // namespace understudy
