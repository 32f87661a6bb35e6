#include "engine/sglang/radix_component.hpp"

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

std::uint32_t RadixComponent::on_covered(RadixNode& node, std::uint32_t) { return node.end(); }

void RadixComponent::link(RadixNode& node, RadixNode* newer) {
  node.newer = newer;
  node.older = newer == nullptr ? newest_ : newer->older;
  (newer == nullptr ? newest_ : newer->older) = &node;
  (node.older == nullptr ? oldest_ : node.older->newer) = &node;
}

void RadixComponent::unlink(RadixNode& node) {
  (node.newer == nullptr ? newest_ : node.newer->older) = node.older;
  (node.older == nullptr ? oldest_ : node.older->newer) = node.newer;
  node.newer = node.older = nullptr;
}

void RadixComponent::give(RadixNode& node) {
  UNDERSTUDY_ASSERT(!node.has_part, "gives a node a second part");
  node.has_part = true;
  link(node, nullptr);
  (node.part_lock > 0 ? locked_ : evictable_) += weight_of(node);
}

void RadixComponent::drop(RadixNode& node) {
  UNDERSTUDY_ASSERT(node.has_part && node.part_lock == 0, "drops a part that is in use");
  node.has_part = false;
  unlink(node);
  evictable_ -= weight_of(node);
  free_ += static_cast<std::int64_t>(weight_of(node));
}

void RadixComponent::move_to_front(RadixNode& node) {
  unlink(node);
  link(node, nullptr);
}

// The node gets the place just behind `newer`.
void RadixComponent::insert_before(RadixNode& node, RadixNode& newer) { link(node, &newer); }

void RadixComponent::add_lock(RadixNode& node) {
  UNDERSTUDY_ASSERT(node.lock > 0, "a part is locked only with its KV");
  if (node.part_lock++ > 0 || !node.has_part) return;
  evictable_ -= weight_of(node);
  locked_ += weight_of(node);
}

void RadixComponent::remove_lock(RadixNode& node) {
  UNDERSTUDY_ASSERT(node.part_lock > 0, "unlocks a part that is not locked");
  if (--node.part_lock > 0 || !node.has_part) return;
  evictable_ += weight_of(node);
  locked_ -= weight_of(node);
}

std::uint64_t RadixComponent::make_room(std::int64_t target) {
  std::uint64_t tokens = 0;
  RadixNode* next = nullptr;
  for (RadixNode* node = oldest_; node != nullptr && free_ < target; node = next) {
    next = node->newer;
    if (node->part_lock > 0) continue;
    if (node->lock == 0 && node->children.empty()) {
      tokens += node->length();
      tree_.remove(*node);
    } else {
      drop(*node);
    }
  }
  return tokens;
}

std::vector<const RadixNode*> RadixComponent::oldest(std::size_t limit) const {
  std::vector<const RadixNode*> out;
  for (const RadixNode* node = oldest_; node != nullptr && out.size() < limit; node = node->newer) {
    if (node->part_lock == 0) out.push_back(node);
  }
  return out;
}

void RadixComponent::check() const {
  std::uint64_t evictable = 0;
  std::uint64_t locked = 0;
  std::size_t parts = 0;
  tree_.each([&](const RadixNode& node) {
    if (node.part_lock > node.lock) throw Error(ErrorKind::InvariantViolated, "a part is locked without its KV");
    if (!node.has_part) return;
    ++parts;
    (node.part_lock > 0 ? locked : evictable) += weight_of(node);
  });
  for (const RadixNode* node = oldest_; node != nullptr; node = node->newer) --parts;
  if (parts != 0 || evictable != evictable_ || locked != locked_) {
    throw Error(ErrorKind::InvariantViolated, "a component of the radix tree holds ", evictable, " evictable and ",
                locked, " locked, where it counts ", evictable_, " and ", locked_);
  }
}

}  // namespace understudy
