// Leaf-first order of cached slots: a block is evicted only when no cached block continues it.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/policy.hpp"

namespace understudy {

enum class LeafOrder : std::uint8_t {
  Tick,  // by the time of release, also while the node is not a leaf: a parent returns to its old position
  Fifo,  // by arrival among the leaves: a parent that becomes a leaf again goes last
};

// A graph of nodes keyed by (position, own hash fragment as a child stores it). A node is real while it holds cached
// slots, and a placeholder while it is only a parent. Copies of one hash, and hashes with equal fragments, share a
// node, first in, first out. Children are counted, not listed, so unlinking one does not depend on its siblings.
class LineageOrder {
 public:
  LineageOrder(const PolicySpace& space, LeafOrder leaf_order);

  void grow(std::size_t slots);
  void insert(SlotId id);
  void remove(SlotId id);
  void warm(std::span<const SlotId> slots) const;
  void warm_parents(std::span<const SlotId> slots) const;
  void touch(SlotId id) {
    remove(id);
    insert(id);
  }
  void pop(std::span<SlotId> out);
  void append_order(std::vector<SlotId>& out, std::size_t limit) const;
  std::size_t memory_bytes() const noexcept;

  std::uint64_t steps = 0;

 private:
  using NodeId = std::uint32_t;
  static constexpr NodeId kNone = 0xFFFFFFFFu;

  // The first slot of a node has the node's id in `prev`, so that removing it needs no search.
  static constexpr SlotId kNodeMark = 0x80000000u;
  static constexpr bool is_node(SlotId prev) noexcept { return (prev & kNodeMark) != 0; }

  struct Node {
    std::uint64_t key = 0;
    std::uint64_t tick = 0;
    SlotId first = kNoSlot;  // its slots, linked through Slot::prev/next
    SlotId last = kNoSlot;
    std::uint32_t children = 0;
    NodeId parent = kNone;
    NodeId heap_at = kNone;  // position in the heap; kNone unless it is a leaf
    NodeId chain = kNone;    // next node of its bucket, or in the list of unused nodes

    bool real() const noexcept { return first != kNoSlot; }
  };

  static std::uint64_t key_of(const LineageHash& lineage) noexcept;
  static std::uint64_t parent_key_of(const LineageHash& lineage) noexcept;
  std::size_t bucket_of(std::uint64_t key) const noexcept;

  NodeId find(std::uint64_t key);
  NodeId find_or_add(std::uint64_t key);
  void unlink_slot(Node& node, SlotId id) noexcept;
  void emptied(NodeId id);
  void drop(NodeId id);

  bool earlier(NodeId a, NodeId b) const noexcept { return nodes_[a].tick < nodes_[b].tick; }
  void enter_leaves(NodeId id);
  void leave_leaves(NodeId id);
  void place(std::size_t at, NodeId id) noexcept;
  void sift_up(std::size_t at, NodeId id) noexcept;
  void sift_down(std::size_t at, NodeId id) noexcept;

  Slot* slots_;
  SlotId first_;  // the pool's slots: [first_, first_ + count_)
  std::uint32_t count_;
  LeafOrder leaf_order_;
  std::uint64_t next_tick_ = 0;
  std::vector<Node> nodes_;
  NodeId unused_ = kNone;
  NodeId recent_parent_ =
      kNone;  // blocks are released tail first, so the next slot is often the parent of the last one
  std::vector<NodeId> buckets_;
  std::vector<NodeId> heap_;
};

}  // namespace understudy
