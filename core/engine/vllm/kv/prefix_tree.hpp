// A tree of block names, in which a node is a run of names without a branch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/short_list.hpp"
#include "base/slab.hpp"
#include "engine/vllm/kv/block_run.hpp"

namespace understudy {

struct PrefixNode {
  ShortList<BlockName> names;
  PrefixNode* parent = nullptr;
  ShortList<BlockRun*> copies;  // by group, the earliest registered first: lookups return it
  std::uint32_t children = 0;
  std::uint32_t depth = 0;  // names before its first
  bool layered = false;     // copies of one group may overlap, or be out of order
};

// Nodes are found by their parent and first name, through one table for all: none has a table of its own.
class PrefixTree {
 public:
  explicit PrefixTree(std::uint32_t num_groups) : table_(kSmallest), no_copies_(num_groups) {}

  PrefixNode& root() noexcept { return root_; }
  const PrefixNode& root() const noexcept { return root_; }
  std::size_t num_nodes() const noexcept { return num_nodes_; }  // without the root
  std::size_t memory_bytes() const noexcept;

  // The child of `parent` that begins with `name`; null: none.
  PrefixNode* child(const PrefixNode& parent, BlockName name) const noexcept {
    for (std::size_t at = home_of(name); table_[at] != nullptr; at = (at + 1) & (table_.size() - 1)) {
      if (table_[at]->names[0] == name && table_[at]->parent == &parent) return table_[at];
    }
    return nullptr;
  }
  // Number of the node's names from `first` on that are equal to `names`, a list, from `from` on.
  template <typename Names>
  static std::uint32_t matching(const PrefixNode& node, std::uint32_t first, const Names& names,
                                std::size_t from) noexcept {
    const std::span<const BlockName> own = node.names.span().subspan(first);
    const std::size_t most = std::min(own.size(), names.size() - from);
    // A name implies those before it, so mostly one comparison is enough.
    if (most > 0 && own[most - 1] == names[from + most - 1]) return static_cast<std::uint32_t>(most);
    std::size_t same = 0;
    while (same < most && own[same] == names[from + same]) ++same;
    return static_cast<std::uint32_t>(same);
  }

  PrefixNode& add_child(PrefixNode& parent, std::span<const BlockName> names);
  // Moves the first `at` names of the node to a new parent, without their copies. Returns that.
  PrefixNode& split(PrefixNode& node, std::uint32_t at);
  // Removes a node without copies and children.
  void remove(PrefixNode& node) noexcept;
  template <typename Visit>
  void for_each(Visit visit) const {
    for (PrefixNode* const node : table_) {
      if (node != nullptr) visit(*node);
    }
  }

 private:
  static constexpr std::size_t kSmallest = 16;

  // Given names may be small numbers: spread them.
  std::size_t home_of(BlockName name) const noexcept {
    return static_cast<std::size_t>((name * 0x9E3779B97F4A7C15u) >> 32) & (table_.size() - 1);
  }
  void insert(PrefixNode& node) noexcept;
  void erase(const PrefixNode& node) noexcept;
  void make_room();

  PrefixNode root_;
  Slab<PrefixNode> nodes_;
  std::vector<PrefixNode*> table_;  // a power of two, at most two thirds of it used
  const std::vector<BlockRun*> no_copies_;
  std::size_t num_nodes_ = 0;
};

}  // namespace understudy
