// SGLang's radix cache: a tree over pages of tokens, whose nodes hold runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "tokens/identities.hpp"
#include "tokens/token_list.hpp"

namespace understudy {

enum class RadixEviction : std::uint8_t { Lru, Lfu, Slru, Fifo, Filo, Mru };

struct RadixNode {
  TokenList key;                                           // a positive multiple of the page size
  std::uint32_t begin = 0;                                 // position of its first token
  RadixNode* parent = nullptr;                             // null: the root
  std::unordered_map<std::uint64_t, RadixNode*> children;  // by the hash of their first page
  std::uint64_t place = 0;                                 // order among siblings
  std::uint32_t lock = 0;
  std::uint64_t used = 0;
  std::uint64_t born = 0;
  std::uint64_t hits = 0;
  std::vector<BlockIdentity> names;  // of its pages; empty: not kept

  std::uint32_t length() const noexcept { return key.size(); }
  std::uint32_t end() const noexcept { return begin + key.size(); }
};

struct RadixMatch {
  RadixNode* node = nullptr;
  std::uint32_t tokens = 0;
};

struct RadixInsert {
  RadixNode* node = nullptr;     // where the tokens end
  std::uint32_t duplicates = 0;  // the request's own tokens that the tree has already
  std::uint32_t stored = 0;      // tokens of the new leaf
};

class RadixTree {
 public:
  // `on_change` is called after a leaf was stored (true) and before a node is removed (false).
  using OnChange = std::function<void(RadixNode& node, bool stored)>;

  RadixTree(std::uint32_t page_size, RadixEviction eviction, bool one_time, OnChange on_change);

  // The longest cached prefix of the first `limit` tokens, in whole pages. Refreshes what it walks; may split a node.
  RadixMatch match(const TokenList& tokens, std::uint32_t limit);
  // Inserts the first `count` tokens (whole pages), of which the tree owns `own` already. Nodes that end beyond
  // `inserted` count a hit.
  RadixInsert insert(const TokenList& tokens, std::uint32_t count, std::uint32_t own, std::uint32_t inserted,
                     bool counts_hits = true);
  void lock(RadixNode* node);
  void unlock(RadixNode* node);
  // Evicts one leaf and returns its tokens; 0: none is evictable.
  std::uint32_t evict();

  RadixNode* root() noexcept { return &root_; }
  std::uint64_t evictable() const noexcept { return evictable_; }
  std::uint64_t locked() const noexcept { return locked_; }
  std::size_t num_nodes() const noexcept { return nodes_.size(); }
  std::vector<const RadixNode*> oldest(std::size_t limit) const;
  void check() const;  // InvariantViolated

 private:
  using Rank = std::tuple<std::int64_t, std::int64_t, std::uint64_t>;

  std::uint64_t key_of(const TokenList& tokens, std::uint32_t from) const { return tokens.hash(from, from + page_); }
  RadixNode* child_of(RadixNode& node, const TokenList& tokens, std::uint32_t from);
  std::uint32_t common(const RadixNode& node, const TokenList& tokens, std::uint32_t from, std::uint32_t limit) const {
    const std::uint32_t equal = tokens.common(from, node.key, limit - from);
    return equal - equal % page_;
  }
  RadixNode* split(RadixNode& lower, std::uint32_t at);
  void touch(RadixNode& node);
  Rank rank_of(const RadixNode& node) const;
  bool is_candidate(const RadixNode& node) const {
    return node.parent != nullptr && node.lock == 0 && node.children.empty();
  }
  void leave(RadixNode& node) { candidates_.erase({rank_of(node), &node}); }
  void join(RadixNode& node) {
    if (is_candidate(node)) candidates_.insert({rank_of(node), &node});
  }

  const std::uint32_t page_;
  const RadixEviction eviction_;
  const bool one_time_;  // a walk has one time, as in the older class
  OnChange on_change_;
  RadixNode root_;
  std::unordered_map<const RadixNode*, std::unique_ptr<RadixNode>> nodes_;
  std::set<std::pair<Rank, RadixNode*>> candidates_;
  std::uint64_t clock_ = 0;
  std::uint64_t places_ = 0;
  std::uint64_t evictable_ = 0;
  std::uint64_t locked_ = 0;
};

}  // namespace understudy
