// A cache that nodes of the radix tree have besides full KV, in a pool of its own: KV of sliding windows, or states.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/sglang/radix_tree.hpp"

namespace understudy {

// A node with a part is in a list by last use. Its full KV stays when its part is evicted (a tombstone).
class RadixComponent {
 public:
  RadixComponent(RadixTree& tree, std::uint64_t size)
      : tree_(tree), size_(size), free_(static_cast<std::int64_t>(size)) {}
  virtual ~RadixComponent() = default;
  RadixComponent(const RadixComponent&) = delete;
  RadixComponent& operator=(const RadixComponent&) = delete;

  // ── Called by the tree ──
  // The walked node where a match ends; null: the root.
  virtual RadixNode* match_end(std::span<RadixNode* const> walked) const = 0;
  // The tokens that a match of such a walk would have; nothing is split.
  virtual std::uint32_t matched(std::span<const RadixStep> walked) const = 0;
  // Where a cached prefix that lacks its part is worth a part of its own, given the tokens walked.
  virtual std::uint32_t branch_at(std::uint32_t walked) const = 0;
  virtual void on_matched(RadixNode& node) = 0;
  virtual void on_split(RadixNode& upper, RadixNode& lower) = 0;
  // An insert covers a node; `live_from`: the request's own part begins there. Returns where duplicates end.
  virtual std::uint32_t on_covered(RadixNode& node, std::uint32_t live_from);
  virtual void on_leaf(RadixNode& leaf, std::uint32_t live_from) = 0;
  // An insert ended at a node. Returns whether it took the part that the request offers.
  virtual bool on_inserted(RadixNode& node, bool is_leaf) = 0;
  virtual void lock(RadixLock& lock) = 0;
  virtual void unlock(const RadixLock& lock) = 0;
  void on_removed(RadixNode& node) {
    if (node.has_part) drop(node);
  }

  // ── Pool ──
  std::int64_t free() const noexcept { return free_; }
  std::uint64_t size() const noexcept { return size_; }
  void take(std::int64_t amount) noexcept { free_ -= amount; }
  void give_back(std::int64_t amount) noexcept { free_ += amount; }
  // Evicts unlocked parts, least recently used first, until `target` is free: a leaf with its KV, else the part alone.
  // Returns the tokens of full KV that were freed.
  std::uint64_t make_room(std::int64_t target);

  std::uint64_t evictable() const noexcept { return evictable_; }
  std::uint64_t locked() const noexcept { return locked_; }
  std::vector<const RadixNode*> oldest(std::size_t limit) const;  // unlocked ones
  void check() const;                                             // InvariantViolated

 protected:
  virtual std::uint64_t weight_of(const RadixNode& node) const = 0;
  void give(RadixNode& node);  // a part that was the request's; it becomes the most recently used
  void drop(RadixNode& node);
  void move_to_front(RadixNode& node);
  void insert_before(RadixNode& node, RadixNode& newer);
  void add_lock(RadixNode& node);
  void remove_lock(RadixNode& node);

  RadixTree& tree_;

 private:
  void link(RadixNode& node, RadixNode* newer);
  void unlink(RadixNode& node);

  const std::uint64_t size_;
  std::int64_t free_;
  RadixNode* newest_ = nullptr;
  RadixNode* oldest_ = nullptr;
  std::uint64_t evictable_ = 0;
  std::uint64_t locked_ = 0;
};

}  // namespace understudy
