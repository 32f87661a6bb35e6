// KV of sliding-window layers: a node has it for all its tokens, or not at all.
#pragma once

#include "engine/sglang/radix_component.hpp"

namespace understudy {

class WindowComponent final : public RadixComponent {
 public:
  WindowComponent(RadixTree& tree, std::uint32_t window, std::uint32_t page_size, std::uint64_t tokens)
      : RadixComponent(tree, tokens), window_(window), page_(page_size) {}

  std::uint32_t window() const noexcept { return window_; }

  // The last node behind which a whole window of KV lies; all of the walk, while every node has its part.
  RadixNode* match_end(std::span<RadixNode* const> walked) const override;
  std::uint32_t matched(std::span<const RadixStep> walked) const override;
  std::uint32_t branch_at(std::uint32_t walked) const override { return walked; }
  void on_matched(RadixNode& node) override;
  void on_split(RadixNode& upper, RadixNode& lower) override;
  std::uint32_t on_covered(RadixNode& node, std::uint32_t live_from) override;
  void on_leaf(RadixNode& leaf, std::uint32_t live_from) override;
  bool on_inserted(RadixNode& node, bool is_leaf) override;
  // Locks at least a window's tokens up from the node.
  void lock(RadixLock& lock) override;
  void unlock(const RadixLock& lock) override;
  // Gives up a lock's window before its KV: the request's own window has slid past it.
  void unlock_early(RadixLock& lock);

 private:
  std::uint64_t weight_of(const RadixNode& node) const override { return node.length(); }

  const std::uint32_t window_;
  const std::uint32_t page_;
  std::uint64_t marks_ = 0;
};

}  // namespace understudy
