#include "engine/vllm/kv/prefix_tree.hpp"

#include "base/assert.hpp"

namespace understudy {

PrefixNode& PrefixTree::add_child(PrefixNode& parent, std::span<const BlockName> names) {
  make_room();
  PrefixNode& node = *nodes_.take();
  node.names.append(names);
  node.copies.append(no_copies_);
  node.parent = &parent;
  node.depth = parent.depth + parent.names.size();
  ++parent.children;
  insert(node);
  return node;
}

// The new node is the upper one: so the children keep their parent.
PrefixNode& PrefixTree::split(PrefixNode& node, std::uint32_t at) {
  UNDERSTUDY_ASSERT(at > 0 && at < node.names.size(), "splits a node at its end");
  make_room();
  PrefixNode& upper = *nodes_.take();
  erase(node);
  upper.names.append(node.names.span().first(at));
  upper.copies.append(no_copies_);
  upper.parent = node.parent;
  upper.depth = node.depth;
  upper.children = 1;
  node.names.drop_front(at);
  node.parent = &upper;
  node.depth += at;
  insert(upper);
  insert(node);
  return upper;
}

void PrefixTree::remove(PrefixNode& node) noexcept {
  UNDERSTUDY_ASSERT(&node != &root_ && node.children == 0, "removes a node that is in use");
  erase(node);
  --node.parent->children;
  nodes_.give_back(&node);
}

void PrefixTree::insert(PrefixNode& node) noexcept {
  std::size_t at = home_of(node.names[0]);
  while (table_[at] != nullptr) at = (at + 1) & (table_.size() - 1);
  table_[at] = &node;
  ++num_nodes_;
}

void PrefixTree::erase(const PrefixNode& node) noexcept {
  const std::size_t mask = table_.size() - 1;
  std::size_t hole = home_of(node.names[0]);
  while (table_[hole] != &node) hole = (hole + 1) & mask;
  // Entries that a search would no longer reach move into the hole.
  for (std::size_t at = (hole + 1) & mask; table_[at] != nullptr; at = (at + 1) & mask) {
    const std::size_t home = home_of(table_[at]->names[0]);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole] = nullptr;
  --num_nodes_;
}

void PrefixTree::make_room() {
  if (3 * (num_nodes_ + 1) <= 2 * table_.size()) return;
  std::vector<PrefixNode*> old(2 * table_.size());
  std::swap(old, table_);
  num_nodes_ = 0;
  for (PrefixNode* const node : old) {
    if (node != nullptr) insert(*node);
  }
}

std::size_t PrefixTree::memory_bytes() const noexcept {
  std::size_t bytes = nodes_.memory_bytes() + table_.capacity() * sizeof(PrefixNode*);
  for_each([&bytes](const PrefixNode& node) { bytes += node.names.memory_bytes() + node.copies.memory_bytes(); });
  return bytes;
}

}  // namespace understudy
