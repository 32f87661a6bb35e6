#include "eviction/lineage.hpp"

#include <algorithm>
#include <array>
#include <queue>
#include <utility>

#include "base/assert.hpp"

namespace understudy {

namespace {

std::uint64_t pack(std::uint32_t position, std::uint64_t fragment, unsigned bits) noexcept {
  const std::uint64_t mode = bits == 54 ? 0 : bits == 46 ? 1 : 2;
  return (mode << 62) | (std::uint64_t{position} << bits) | fragment;
}

template <typename T>
void load(T value) noexcept {
  asm volatile("" : "+r"(value));
}

}  // namespace

LineageOrder::LineageOrder(const PolicySpace& space, LeafOrder leaf_order)
    : slots_(space.slots), first_(space.first), count_(space.count), leaf_order_(leaf_order), buckets_(1, kNone) {}

void LineageOrder::grow(std::size_t slots) {
  if (slots < buckets_.size()) return;
  nodes_.reserve(slots + 1);
  std::vector<NodeId> old(slots + 1, kNone);
  old.swap(buckets_);
  for (NodeId id : old) {
    while (id != kNone) {
      const NodeId next = nodes_[id].chain;
      NodeId& bucket = buckets_[bucket_of(nodes_[id].key)];
      nodes_[id].chain = bucket;
      bucket = id;
      id = next;
    }
  }
}

// A child decides how many bits of its parent it stores, so a node's key is cut for position + 1.
std::uint64_t LineageOrder::key_of(const LineageHash& lineage) noexcept {
  const std::uint32_t child = lineage.position() + 1;
  return pack(lineage.position(), lineage.fragment_for_child(child), LineageHash::fragment_bits(child));
}

std::uint64_t LineageOrder::parent_key_of(const LineageHash& lineage) noexcept {
  return pack(lineage.position() - 1, lineage.parent_fragment(), lineage.bits());
}

std::size_t LineageOrder::bucket_of(std::uint64_t key) const noexcept {
  const std::uint64_t mixed = (key ^ (key >> 31)) * 0x9E3779B97F4A7C15u;
  return static_cast<std::size_t>(((mixed >> 32) * buckets_.size()) >> 32);
}

void LineageOrder::insert(SlotId id) {
  const LineageHash& lineage = slots_[id].lineage;
  const NodeId node_id = find_or_add(key_of(lineage));
  const bool was_real = nodes_[node_id].real();
  {
    Node& node = nodes_[node_id];
    slots_[id].prev = was_real ? node.last : kNodeMark | node_id;
    slots_[id].next = kNoSlot;
    if (was_real) {
      slots_[node.last].next = id;
    } else {
      node.first = id;
    }
    node.last = id;
  }
  if (was_real) return;

  nodes_[node_id].tick = next_tick_++;
  if (lineage.position() > 0 && nodes_[node_id].parent == kNone) {
    const NodeId parent_id = find_or_add(parent_key_of(lineage));
    nodes_[node_id].parent = parent_id;
    if (nodes_[parent_id].children++ == 0 && nodes_[parent_id].heap_at != kNone) leave_leaves(parent_id);
    recent_parent_ = parent_id;
  }
  if (nodes_[node_id].children == 0) enter_leaves(node_id);
}

void LineageOrder::remove(SlotId id) {
  const SlotId prev = slots_[id].prev;
  const NodeId node_id = is_node(prev) ? prev & ~kNodeMark : find(key_of(slots_[id].lineage));
  UNDERSTUDY_ASSERT(node_id != kNone && nodes_[node_id].real(), "removes a slot that no node holds");
  unlink_slot(nodes_[node_id], id);
  if (!nodes_[node_id].real()) emptied(node_id);
}

// Loads the nodes of cached slots back to back, so that their cache misses overlap.
void LineageOrder::warm(std::span<const SlotId> slots) const {
  for (const SlotId id : slots) {
    // A guess may be a slot of another pool, whose links mean something else.
    if (id - first_ >= count_ || slots_[id].state != SlotState::Inactive || !is_node(slots_[id].prev)) continue;
    load(nodes_[slots_[id].prev & ~kNodeMark].key);
  }
}

// Loads the buckets of the parents of slots to be inserted, then the nodes in them, so that misses overlap.
void LineageOrder::warm_parents(std::span<const SlotId> slots) const {
  std::array<NodeId, 16> first;
  while (!slots.empty()) {
    const std::size_t count = std::min(first.size(), slots.size());
    for (std::size_t i = 0; i < count; ++i) {
      const LineageHash& lineage = slots_[slots[i]].lineage;
      first[i] = lineage.position() == 0 ? kNone : buckets_[bucket_of(parent_key_of(lineage))];
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (first[i] != kNone) load(nodes_[first[i]].chain);
    }
    slots = slots.subspan(count);
  }
}

void LineageOrder::pop(std::span<SlotId> out) {
  for (SlotId& id : out) {
    UNDERSTUDY_ASSERT(!heap_.empty(), "evicts from an order without leaves");
    const NodeId node_id = heap_.front();
    UNDERSTUDY_ASSERT(nodes_[node_id].real() && nodes_[node_id].children == 0, "the heap holds leaves only");
    id = nodes_[node_id].first;
    unlink_slot(nodes_[node_id], id);
    if (!nodes_[node_id].real()) emptied(node_id);
  }
}

void LineageOrder::unlink_slot(Node& node, SlotId id) noexcept {
  Slot& slot = slots_[id];
  (is_node(slot.prev) ? node.first : slots_[slot.prev].next) = slot.next;
  (slot.next == kNoSlot ? node.last : slots_[slot.next].prev) = slot.prev;
  slot.prev = slot.next = kNoSlot;
}

// Drops a node without slots and children, which may make its parent a leaf; one with children stays as a placeholder.
void LineageOrder::emptied(NodeId id) {
  while (nodes_[id].children == 0 && !nodes_[id].real()) {
    ++steps;
    const NodeId parent = nodes_[id].parent;
    UNDERSTUDY_ASSERT(parent == kNone || nodes_[parent].children > 0, "a parent has lost count of its children");
    const bool exposes = parent != kNone && --nodes_[parent].children == 0;
    if (exposes && nodes_[parent].real() && nodes_[id].heap_at != kNone) {
      // The usual eviction: the parent takes its child's place in the heap, most often without moving.
      const std::size_t at = nodes_[id].heap_at;
      nodes_[id].heap_at = kNone;
      if (leaf_order_ == LeafOrder::Fifo) nodes_[parent].tick = next_tick_++;
      sift_up(at, parent);
      sift_down(nodes_[parent].heap_at, parent);
      drop(id);
      return;
    }
    if (nodes_[id].heap_at != kNone) leave_leaves(id);
    drop(id);
    if (!exposes) return;
    if (nodes_[parent].real()) {
      enter_leaves(parent);
      return;
    }
    id = parent;
  }
}

LineageOrder::NodeId LineageOrder::find(std::uint64_t key) {
  if (recent_parent_ != kNone && nodes_[recent_parent_].key == key) return recent_parent_;
  NodeId id = buckets_[bucket_of(key)];
  while (id != kNone && nodes_[id].key != key) {
    ++steps;
    id = nodes_[id].chain;
  }
  return id;
}

LineageOrder::NodeId LineageOrder::find_or_add(std::uint64_t key) {
  NodeId id = find(key);
  if (id != kNone) return id;
  if (unused_ != kNone) {
    id = unused_;
    unused_ = nodes_[id].chain;
    nodes_[id] = Node{};
  } else {
    id = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
  }
  NodeId& bucket = buckets_[bucket_of(key)];
  nodes_[id].key = key;
  nodes_[id].chain = bucket;
  bucket = id;
  return id;
}

void LineageOrder::drop(NodeId id) {
  UNDERSTUDY_ASSERT(!nodes_[id].real() && nodes_[id].children == 0 && nodes_[id].heap_at == kNone,
                    "drops a node that is in use");
  NodeId* link = &buckets_[bucket_of(nodes_[id].key)];
  while (*link != id) {
    ++steps;
    link = &nodes_[*link].chain;
  }
  *link = nodes_[id].chain;
  nodes_[id].chain = unused_;
  unused_ = id;
  if (recent_parent_ == id) recent_parent_ = kNone;
}

void LineageOrder::enter_leaves(NodeId id) {
  if (leaf_order_ == LeafOrder::Fifo) nodes_[id].tick = next_tick_++;
  heap_.push_back(id);
  UNDERSTUDY_ASSERT(nodes_[id].heap_at == kNone, "a leaf is in the heap already");
  sift_up(heap_.size() - 1, id);
}

void LineageOrder::leave_leaves(NodeId id) {
  const std::size_t at = nodes_[id].heap_at;
  UNDERSTUDY_ASSERT(at < heap_.size() && heap_[at] == id, "a leaf is not where it says it is");
  nodes_[id].heap_at = kNone;
  const NodeId moved = heap_.back();
  heap_.pop_back();
  if (moved == id) return;
  sift_up(at, moved);
  sift_down(nodes_[moved].heap_at, moved);
}

void LineageOrder::place(std::size_t at, NodeId id) noexcept {
  heap_[at] = id;
  nodes_[id].heap_at = static_cast<NodeId>(at);
}

void LineageOrder::sift_up(std::size_t at, NodeId id) noexcept {
  while (at > 0) {
    ++steps;
    const std::size_t up = (at - 1) / 2;
    if (!earlier(id, heap_[up])) break;
    place(at, heap_[up]);
    at = up;
  }
  place(at, id);
}

void LineageOrder::sift_down(std::size_t at, NodeId id) noexcept {
  for (std::size_t down = 2 * at + 1; down < heap_.size(); down = 2 * at + 1) {
    ++steps;
    if (down + 1 < heap_.size() && earlier(heap_[down + 1], heap_[down])) ++down;
    if (!earlier(heap_[down], id)) break;
    place(at, heap_[down]);
    at = down;
  }
  place(at, id);
}

// Simulates the evictions on a copy of the child counts; leaves the graph unchanged.
void LineageOrder::append_order(std::vector<SlotId>& out, std::size_t limit) const {
  using Leaf = std::pair<std::uint64_t, NodeId>;
  std::priority_queue<Leaf, std::vector<Leaf>, std::greater<>> leaves;
  for (const NodeId id : heap_) leaves.emplace(nodes_[id].tick, id);
  std::vector<std::uint32_t> children(nodes_.size());
  for (std::size_t i = 0; i < nodes_.size(); ++i) children[i] = nodes_[i].children;
  std::uint64_t tick = next_tick_;

  while (!leaves.empty() && out.size() < limit) {
    NodeId id = leaves.top().second;
    leaves.pop();
    for (SlotId slot = nodes_[id].first; slot != kNoSlot && out.size() < limit; slot = slots_[slot].next) {
      out.push_back(slot);
    }
    for (NodeId up = nodes_[id].parent; up != kNone && --children[up] == 0; up = nodes_[up].parent) {
      if (!nodes_[up].real()) continue;
      leaves.emplace(leaf_order_ == LeafOrder::Fifo ? tick++ : nodes_[up].tick, up);
      break;
    }
  }
}

std::size_t LineageOrder::memory_bytes() const noexcept {
  return nodes_.capacity() * sizeof(Node) + buckets_.capacity() * sizeof(NodeId) + heap_.capacity() * sizeof(NodeId);
}

}  // namespace understudy
