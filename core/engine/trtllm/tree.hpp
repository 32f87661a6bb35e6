// TensorRT-LLM's radix tree of blocks, with reuse of parts of a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "base/flat_map.hpp"
#include "engine/trtllm/cache_events.hpp"
#include "engine/trtllm/page.hpp"
#include "engine/trtllm/page_store.hpp"

namespace understudy {

// Learns which full blocks can be found: those with a page of full attention, or all of the tree if there is none.
class TrtWatcher {
 public:
  virtual ~TrtWatcher() = default;
  virtual void stored(TrtNode& node, std::size_t level) = 0;
  virtual void removed(TrtNode& node, std::size_t level) = 0;
};

class TrtTree {
 public:
  // Blocks from the root, and their tokens that can be used.
  struct Match {
    std::vector<TrtNode*> blocks;
    std::uint32_t tokens = 0;
  };
  struct Added {
    TrtNode* node = nullptr;  // the block of these tokens, or another that has them all
    bool is_new = false;
  };

  TrtTree(TrtStore& store, TrtEvents* events, bool partial_reuse);
  TrtTree(const TrtTree&) = delete;
  TrtTree& operator=(const TrtTree&) = delete;

  std::uint32_t block_size() const noexcept { return block_size_; }
  std::size_t num_blocks() const noexcept { return index_.size(); }
  TrtNode& root(const TrtScope& scope);
  // The longest prefix of [0, end) whose pages are all here. Holds nothing.
  Match match(const TrtScope& scope, const TokenList& tokens, std::uint32_t end) const;
  // Adds [from, to) of the tokens behind a block. Shorter blocks that it covers are removed, and their pages become its
  // own.
  Added add(TrtNode& parent, const TokenList& tokens, std::uint32_t from, std::uint32_t to);
  // Gives a committed page to a block, in place of one that covers less.
  void put_page(TrtNode& node, TrtPage& page);
  void unlink(TrtPage& page);
  // Removes blocks that are of no use without a page that they have lost.
  void remove_stale(TrtNode& start, std::size_t life_cycle);
  void moved(const TrtPage& page, std::size_t from);

  void refer(TrtNode& node) noexcept { ++node.refs; }
  void drop(TrtNode& node) {
    if (--node.refs == 0 && !node.is_root) free(node);
  }
  bool is_full(const TrtNode& node) const noexcept { return node.tokens.size() == block_size_; }
  TrtEvents* events() noexcept { return events_; }
  void watch(TrtWatcher& watcher);
  void check() const;

 private:
  static constexpr std::uint32_t kMostChildrenToCompare = 31;

  TrtNode* find_child(const TrtNode& parent, std::uint64_t key) const;
  TrtNode* find_root(const TrtScope& scope) const;
  bool is_watched(const TrtPage& page) const {
    return watcher_ != nullptr && page.life_cycle == watched_ && page.covered == block_size_;
  }
  void attach(TrtNode& parent, TrtNode& node);
  void detach(TrtNode& node);
  void remove_subtree(TrtNode& top);
  void shorten(Match& match, std::vector<std::uint32_t>& lengths) const;
  void free(TrtNode& node);
  TrtNode& make();

  TrtStore& store_;
  TrtEvents* events_;
  bool partial_reuse_;
  std::uint32_t block_size_;
  std::deque<TrtNode> all_;
  std::vector<TrtNode*> spare_;
  std::vector<TrtNode*> roots_;
  mutable FlatMap<TrtNode*> index_;  // attached blocks by key; it has no lookup of constant maps
  TrtWatcher* watcher_ = nullptr;
  std::size_t watched_ = 0;  // life cycle; as many as there are: blocks are watched, not pages
};

// Keeps a block while it is in scope.
class TrtNodeRef {
 public:
  TrtNodeRef(TrtTree& tree, TrtNode* node) : tree_(tree), node_(node) {
    if (node_ != nullptr) tree_.refer(*node_);
  }
  ~TrtNodeRef() { reset(nullptr); }
  TrtNodeRef(const TrtNodeRef&) = delete;
  TrtNodeRef& operator=(const TrtNodeRef&) = delete;

  void reset(TrtNode* node) {
    if (node != nullptr) tree_.refer(*node);
    if (TrtNode* const old = std::exchange(node_, node); old != nullptr) tree_.drop(*old);
  }
  TrtNode& operator*() const noexcept { return *node_; }

 private:
  TrtTree& tree_;
  TrtNode* node_;
};

}  // namespace understudy
