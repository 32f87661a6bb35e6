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

struct HostWrite;
struct HostLoad;

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

  // With a host tier (HostCache); at least one of the two is true.
  bool device = true;
  bool host = false;
  std::uint32_t host_lock = 0;
  std::uint32_t device_children = 0;
  HostWrite* write = nullptr;         // its backup, queued or in flight
  HostLoad* load = nullptr;           // its load, queued or in flight
  std::uint64_t duplicate_place = 0;  // in the list of duplicates; 0: not there

  // With a component (RadixComponent).
  bool has_part = false;
  std::uint32_t part_lock = 0;
  std::uint64_t part_mark = 0;  // names the last node of a locked window; 0: of none
  RadixNode* newer = nullptr;   // by the last use of the part
  RadixNode* older = nullptr;

  std::uint32_t length() const noexcept { return key.size(); }
  std::uint32_t end() const noexcept { return begin + key.size(); }
};

struct RadixMatch {
  RadixNode* node = nullptr;  // last one on the device
  std::uint32_t tokens = 0;
  RadixNode* last = nullptr;      // last one on any tier
  std::uint32_t host_tokens = 0;  // behind `tokens`, on the host only
  std::uint32_t branch = 0;       // behind `tokens`: where a part of the component is worth caching; 0: nowhere
};

// What a request locks: a node with its ancestors, and their parts.
struct RadixLock {
  RadixNode* node = nullptr;  // null: nothing
  std::uint64_t mark = 0;     // of the node where the locked window ends; 0: it reaches the root
  bool part_unlocked = false;
};

enum class RadixTier : std::uint8_t { Device, Host };

// A host tier below the tree.
class RadixWatcher {
 public:
  virtual ~RadixWatcher() = default;
  virtual void on_split(RadixNode& upper, RadixNode& lower) = 0;
  virtual bool counts_hits() const = 0;
  virtual void on_hit(RadixNode& node) = 0;       // an insert counted a hit
  virtual void on_restored(RadixNode& node) = 0;  // a request's pages became the node's device copy
  virtual void on_removed(RadixNode& node) = 0;   // before it is deleted
};

class RadixComponent;

// A node of a walk, and its leading tokens that are equal.
struct RadixStep {
  const RadixNode* node = nullptr;
  std::uint32_t tokens = 0;
};

struct RadixInsertion {
  std::uint32_t count = 0;     // leading tokens, in whole pages
  std::uint32_t own = 0;       // of which the tree owns these already
  std::uint32_t inserted = 0;  // nodes that end beyond it count a hit
  bool counts_hits = true;
  std::uint32_t window_begin = 0;  // the request's window KV begins there
};

struct RadixInsert {
  RadixNode* node = nullptr;            // where the tokens end
  std::uint32_t duplicates = 0;         // the request's own tokens that the tree has already
  std::uint32_t window_duplicates = 0;  // part of them: with window KV
  std::uint32_t stored = 0;             // tokens of the new leaf
  bool took_part = false;               // the tree took the state that the request offered
};

class RadixTree {
 public:
  // `on_change` is called after a node was stored on a tier (true) and before it is removed from one (false).
  using OnChange = std::function<void(RadixNode& node, bool stored, RadixTier tier)>;

  RadixTree(std::uint32_t page_size, RadixEviction eviction, bool one_time, OnChange on_change);
  void set_watcher(RadixWatcher* watcher) noexcept { watcher_ = watcher; }
  void set_component(RadixComponent* component) noexcept { component_ = component; }

  // The longest cached prefix of the first `limit` tokens, in whole pages. Refreshes what it walks; may split a node.
  RadixMatch match(const TokenList& tokens, std::uint32_t limit);
  // The length of the longest cached prefix; changes nothing.
  std::uint32_t find(const TokenList& tokens) const;
  RadixInsert insert(const TokenList& tokens, const RadixInsertion& how);
  void lock(RadixNode* node);
  void unlock(RadixNode* node);
  // The same with parts of the component. Releasing a lock of nothing does nothing.
  RadixLock acquire(RadixNode* node);
  void release(RadixLock& lock);
  // Evicts one leaf and returns its tokens; 0: none is evictable.
  std::uint32_t evict();

  // ── With a component ──
  RadixNode* split(RadixNode& lower, std::uint32_t at);  // returns the upper part
  void touch(RadixNode& node);                           // it is the most recently used

  // ── With a host tier ──
  // Device leaves, and nodes on the host only without children, both unlocked; the first to evict is first.
  const auto& device_leaves() const noexcept { return candidates_; }
  const auto& host_leaves() const noexcept { return host_candidates_; }
  void demote(RadixNode& node);   // drops the device copy of a device leaf
  void restore(RadixNode& node);  // gives a node on the host a device copy
  void set_host(RadixNode& node, bool host);
  void lock_host(RadixNode& node, bool on);
  void remove(RadixNode& node);  // a node without children

  RadixNode* root() noexcept { return &root_; }
  std::uint64_t evictable() const noexcept { return evictable_; }
  std::uint64_t locked() const noexcept { return locked_; }
  std::size_t num_nodes() const noexcept { return nodes_.size(); }
  std::vector<const RadixNode*> oldest(std::size_t limit, RadixTier tier = RadixTier::Device) const;
  template <typename Visit>
  void each(Visit visit) const {
    for (const auto& [node, owned] : nodes_) visit(*node);
  }
  void check() const;  // InvariantViolated

 private:
  using Rank = std::tuple<std::int64_t, std::int64_t, std::uint64_t>;
  using Candidates = std::set<std::pair<Rank, RadixNode*>>;

  std::uint64_t key_of(const TokenList& tokens, std::uint32_t from) const { return tokens.hash(from, from + page_); }
  RadixNode* child_of(RadixNode& node, const TokenList& tokens, std::uint32_t from);
  std::uint32_t common(const RadixNode& node, const TokenList& tokens, std::uint32_t from, std::uint32_t limit) const {
    const std::uint32_t equal = tokens.common(from, node.key, limit - from);
    return equal - equal % page_;
  }
  RadixNode& add_leaf(RadixNode& parent, const TokenList& tokens, std::uint32_t from, std::uint32_t to);
  void count_hit(RadixNode& node);
  Rank rank_of(const RadixNode& node) const;
  // The set of candidates that a node belongs to; null: none.
  Candidates* candidates_of(const RadixNode& node) {
    if (node.parent == nullptr || node.lock > 0) return nullptr;
    if (node.device) return node.device_children == 0 ? &candidates_ : nullptr;
    return node.host_lock == 0 && node.children.empty() ? &host_candidates_ : nullptr;
  }
  // A node leaves its set before a field changes on which its place depends, and joins again after.
  void leave(RadixNode& node) {
    if (Candidates* const from = candidates_of(node)) from->erase({rank_of(node), &node});
  }
  void join(RadixNode& node) {
    if (Candidates* const to = candidates_of(node)) to->insert({rank_of(node), &node});
  }

  const std::uint32_t page_;
  const RadixEviction eviction_;
  const bool one_time_;  // a walk has one time, as in the older class
  OnChange on_change_;
  RadixNode root_;
  std::unordered_map<const RadixNode*, std::unique_ptr<RadixNode>> nodes_;
  Candidates candidates_;
  Candidates host_candidates_;
  RadixWatcher* watcher_ = nullptr;
  RadixComponent* component_ = nullptr;
  std::uint64_t clock_ = 0;
  std::uint64_t places_ = 0;
  std::uint64_t evictable_ = 0;
  std::uint64_t locked_ = 0;
};

}  // namespace understudy
