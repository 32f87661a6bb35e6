// States of recurrent layers: a node has the state after its last token, or none.
#pragma once

#include "engine/sglang/radix_component.hpp"

namespace understudy {

class StateComponent final : public RadixComponent {
 public:
  // `grid`: tokens between states that a prefill can cache; `most_per_path`: states from a leaf to the root, -1: any.
  StateComponent(RadixTree& tree, std::uint64_t slots, std::uint32_t grid, std::int64_t most_per_path)
      : RadixComponent(tree, slots), grid_(grid), most_per_path_(most_per_path) {}

  RadixNode* match_end(std::span<RadixNode* const> walked) const override;
  std::uint32_t matched(std::span<const RadixStep> walked) const override;
  std::uint32_t branch_at(std::uint32_t walked) const override { return walked - walked % grid_; }
  void on_matched(RadixNode& node) override { move_to_front(node); }
  void on_split(RadixNode&, RadixNode&) override {}  // the lower part keeps the state, and its locks
  void on_leaf(RadixNode&, std::uint32_t) override {}
  bool on_inserted(RadixNode& node, bool is_leaf) override;
  void lock(RadixLock& lock) override;
  void unlock(const RadixLock& lock) override;
  // Gives up a lock's state before its KV.
  void unlock_early(RadixLock& lock);

 private:
  std::uint64_t weight_of(const RadixNode&) const override { return 1; }
  void cap_path(RadixNode& end);

  const std::uint32_t grid_;
  const std::int64_t most_per_path_;
};

}  // namespace understudy
