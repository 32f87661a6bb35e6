#include "engine/sglang/radix_tree.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/sglang/radix_component.hpp"

namespace understudy {

RadixTree::RadixTree(std::uint32_t page_size, RadixEviction eviction, bool one_time, OnChange on_change)
    : page_(page_size), eviction_(eviction), one_time_(one_time), on_change_(std::move(on_change)) {}

RadixTree::Rank RadixTree::rank_of(const RadixNode& node) const {
  const auto used = static_cast<std::int64_t>(node.used);
  const auto born = static_cast<std::int64_t>(node.born);
  const auto hits = static_cast<std::int64_t>(node.hits);
  switch (eviction_) {
    case RadixEviction::Lru:
      return {used, 0, node.place};
    case RadixEviction::Lfu:
      return {hits, used, node.place};
    case RadixEviction::Slru:
      return {hits >= 2 ? 1 : 0, used, node.place};
    case RadixEviction::Fifo:
      return {born, 0, node.place};
    case RadixEviction::Filo:
      return {-born, 0, node.place};
    case RadixEviction::Mru:
      return {-used, 0, node.place};
  }
  return {};
}

RadixNode* RadixTree::child_of(RadixNode& node, const TokenList& tokens, std::uint32_t from) {
  const auto found = node.children.find(key_of(tokens, from));
  return found == node.children.end() ? nullptr : found->second;
}

void RadixTree::touch(RadixNode& node) {
  if (node.parent == nullptr) return;
  leave(node);
  node.used = one_time_ ? clock_ : ++clock_;
  join(node);
}

// The upper part is a new node in the place of the old one, which keeps the rest.
RadixNode* RadixTree::split(RadixNode& lower, std::uint32_t at) {
  UNDERSTUDY_ASSERT(at > 0 && at < lower.length() && at % page_ == 0, "splits a node at a page inside it");
  auto made = std::make_unique<RadixNode>();
  RadixNode& upper = *made;
  nodes_.emplace(made.get(), std::move(made));
  leave(lower);
  upper.key = lower.key.slice(0, at);
  upper.begin = lower.begin;
  upper.parent = lower.parent;
  upper.place = lower.place;
  upper.lock = lower.lock;
  upper.hits = lower.hits;
  upper.device = lower.device;
  upper.host = lower.host;
  upper.host_lock = lower.host_lock;
  upper.device_children = lower.device ? 1 : 0;
  upper.born = one_time_ ? ++clock_ : lower.born;
  upper.parent->children[key_of(upper.key, 0)] = &upper;
  lower.key = lower.key.slice(at, lower.key.size());
  if (!lower.names.empty()) {
    const auto pages = static_cast<std::ptrdiff_t>(at / page_);
    upper.names.assign(lower.names.begin(), lower.names.begin() + pages);
    lower.names.erase(lower.names.begin(), lower.names.begin() + pages);
  }
  lower.begin += at;
  lower.parent = &upper;
  lower.place = ++places_;
  upper.children[key_of(lower.key, 0)] = &lower;
  upper.used = ++clock_;
  if (!one_time_) lower.used = ++clock_;
  join(lower);
  if (watcher_ != nullptr) watcher_->on_split(upper, lower);
  if (component_ != nullptr) component_->on_split(upper, lower);
  return &upper;
}

RadixMatch RadixTree::match(const TokenList& tokens, std::uint32_t limit) {
  limit = std::min(limit, tokens.size());
  limit -= limit % page_;
  RadixMatch out{&root_, 0, &root_, 0};
  if (limit == 0) return out;
  if (one_time_) ++clock_;
  const std::uint64_t time = clock_;
  std::vector<RadixNode*> walked;  // with a component
  std::uint32_t at = 0;
  while (at < limit) {
    RadixNode* child = child_of(*out.last, tokens, at);
    if (child == nullptr) break;
    const std::uint32_t equal = common(*child, tokens, at, limit);
    if (equal == 0) break;
    const bool whole = equal == child->length();
    if (one_time_) {
      leave(*child);
      child->used = time;
      join(*child);
    }
    out.last = whole ? child : split(*child, equal);
    at += equal;
    if (out.last->device) {
      out.node = out.last;
      out.tokens = at;
    } else {
      out.host_tokens += equal;
    }
    if (component_ != nullptr) walked.push_back(out.last);
    if (!whole) break;
  }
  if (component_ != nullptr) {
    RadixNode* const end = component_->match_end(walked);
    out.node = out.last = end == nullptr ? &root_ : end;
    out.tokens = out.node->end();
    const std::uint32_t branch = component_->branch_at(at);
    if (branch > out.tokens) out.branch = branch;
    if (end != nullptr) component_->on_matched(*end);
  }
  if (one_time_) return out;
  // The node reached is the most recently used, and its ancestors are just before it.
  std::vector<RadixNode*> path;
  for (RadixNode* node = out.last; node->parent != nullptr; node = node->parent) path.push_back(node);
  for (auto node = path.rbegin(); node != path.rend(); ++node) touch(**node);
  return out;
}

std::uint32_t RadixTree::find(const TokenList& tokens) const {
  const std::uint32_t limit = tokens.size() - tokens.size() % page_;
  const RadixNode* node = &root_;
  std::vector<RadixStep> walked;  // with a component
  std::uint32_t at = 0;
  while (at < limit) {
    const auto found = node->children.find(key_of(tokens, at));
    if (found == node->children.end()) break;
    node = found->second;
    const std::uint32_t equal = common(*node, tokens, at, limit);
    at += equal;
    if (component_ != nullptr) walked.push_back({node, equal});
    if (equal < node->length()) break;
  }
  return component_ == nullptr ? at : component_->matched(walked);
}

RadixInsert RadixTree::insert(const TokenList& tokens, const RadixInsertion& how) {
  const std::uint32_t count = how.count;
  UNDERSTUDY_ASSERT(count % page_ == 0 && count <= tokens.size(), "inserts whole pages");
  RadixInsert out;
  out.node = &root_;
  if (count == 0) return out;
  if (one_time_) ++clock_;
  const std::uint64_t time = clock_;
  std::uint32_t at = 0;
  while (at < count) {
    RadixNode* child = child_of(*out.node, tokens, at);
    const std::uint32_t equal = child == nullptr ? 0 : common(*child, tokens, at, count);
    if (equal == 0) break;
    leave(*child);
    child->used = one_time_ ? time : ++clock_;
    join(*child);
    RadixNode* const node = equal == child->length() ? child : split(*child, equal);
    if (!node->device) {
      restore(*node);
      watcher_->on_restored(*node);
    } else if (node->end() > how.own) {
      const std::uint32_t from = std::max(how.own, at);
      std::uint32_t to = node->end();
      if (component_ != nullptr) {
        to = component_->on_covered(*node, how.window_begin);
        out.duplicates += node->end() - to;  // one of two copies of its full KV
      }
      if (from < to) {
        out.duplicates += to - from;
        out.window_duplicates += to - std::clamp(how.window_begin, from, to);
      }
    }
    if (how.counts_hits && node->end() > how.inserted) count_hit(*node);
    out.node = node;
    at += equal;
  }
  const bool is_leaf = at < count;
  if (is_leaf) {
    RadixNode& leaf = add_leaf(*out.node, tokens, at, count);
    out.stored = leaf.length();
    out.node = &leaf;
    if (component_ != nullptr) component_->on_leaf(leaf, how.window_begin);
    if (how.counts_hits && count > how.inserted) count_hit(leaf);
  }
  if (component_ != nullptr) out.took_part = component_->on_inserted(*out.node, is_leaf);
  return out;
}

RadixNode& RadixTree::add_leaf(RadixNode& parent, const TokenList& tokens, std::uint32_t from, std::uint32_t to) {
  auto made = std::make_unique<RadixNode>();
  RadixNode& leaf = *made;
  nodes_.emplace(made.get(), std::move(made));
  leaf.key = tokens.slice(from, to);
  leaf.begin = from;
  leaf.parent = &parent;
  leaf.place = ++places_;
  leaf.used = leaf.born = ++clock_;
  leave(parent);
  parent.children[key_of(leaf.key, 0)] = &leaf;
  ++parent.device_children;
  join(leaf);
  evictable_ += leaf.length();
  on_change_(leaf, true, RadixTier::Device);
  return leaf;
}

void RadixTree::count_hit(RadixNode& node) {
  if (watcher_ != nullptr && !watcher_->counts_hits()) return;
  leave(node);
  ++node.hits;
  join(node);
  if (watcher_ != nullptr) watcher_->on_hit(node);
}

void RadixTree::lock(RadixNode* node) {
  for (; node->parent != nullptr; node = node->parent) {
    if (node->lock == 0) {
      leave(*node);
      if (node->device) {
        evictable_ -= node->length();
        locked_ += node->length();
      }
    }
    ++node->lock;
  }
}

void RadixTree::unlock(RadixNode* node) {
  for (; node->parent != nullptr; node = node->parent) {
    UNDERSTUDY_ASSERT(node->lock > 0, "unlocks a node that is not locked");
    if (--node->lock > 0) continue;
    if (node->device) {
      evictable_ += node->length();
      locked_ -= node->length();
    }
    join(*node);
  }
}

RadixLock RadixTree::acquire(RadixNode* node) {
  RadixLock out{node};
  lock(node);
  if (component_ != nullptr) component_->lock(out);
  return out;
}

void RadixTree::release(RadixLock& lock) {
  if (lock.node == nullptr) return;
  if (component_ != nullptr) component_->unlock(lock);
  unlock(lock.node);
  lock = {};
}

std::uint32_t RadixTree::evict() {
  if (candidates_.empty()) return 0;
  RadixNode& node = *candidates_.begin()->second;
  const std::uint32_t tokens = node.length();
  remove(node);
  return tokens;
}

void RadixTree::remove(RadixNode& node) {
  UNDERSTUDY_ASSERT(node.children.empty() && node.lock == 0, "removes a node that is in use");
  if (node.device) {
    on_change_(node, false, RadixTier::Device);
    evictable_ -= node.length();
  } else {
    on_change_(node, false, RadixTier::Host);
  }
  if (watcher_ != nullptr) watcher_->on_removed(node);
  if (component_ != nullptr) component_->on_removed(node);
  leave(node);
  RadixNode& parent = *node.parent;
  parent.children.erase(key_of(node.key, 0));
  if (node.device) --parent.device_children;
  join(parent);
  nodes_.erase(&node);
}

void RadixTree::demote(RadixNode& node) {
  UNDERSTUDY_ASSERT(node.device && node.host && node.lock == 0 && node.device_children == 0, "demotes no device leaf");
  on_change_(node, false, RadixTier::Device);
  leave(node);
  node.device = false;
  evictable_ -= node.length();
  join(node);
  --node.parent->device_children;
  join(*node.parent);
}

void RadixTree::restore(RadixNode& node) {
  UNDERSTUDY_ASSERT(!node.device && node.host, "restores a node that is on the device");
  leave(node);
  leave(*node.parent);
  node.device = true;
  ++node.parent->device_children;
  (node.lock > 0 ? locked_ : evictable_) += node.length();
  join(node);
  on_change_(node, true, RadixTier::Device);
}

void RadixTree::set_host(RadixNode& node, bool host) {
  UNDERSTUDY_ASSERT(node.device && node.host != host, "changes the host copy of a node without a device copy");
  node.host = host;
}

void RadixTree::lock_host(RadixNode& node, bool on) {
  leave(node);
  node.host_lock += on ? 1 : std::uint32_t(-1);
  join(node);
}

std::vector<const RadixNode*> RadixTree::oldest(std::size_t limit, RadixTier tier) const {
  const Candidates& from = tier == RadixTier::Device ? candidates_ : host_candidates_;
  std::vector<const RadixNode*> out;
  for (auto at = from.begin(); at != from.end() && out.size() < limit; ++at) out.push_back(at->second);
  return out;
}

void RadixTree::check() const {
  std::uint64_t evictable = 0;
  std::uint64_t locked = 0;
  for (const auto& [node, owned] : nodes_) {
    if (node->device) (node->lock > 0 ? locked : evictable) += node->length();
    const auto below = static_cast<std::size_t>(
        std::ranges::count_if(node->children, [](const auto& child) { return child.second->device; }));
    const bool wrong = node->length() == 0 || node->length() % page_ != 0 || !(node->device || node->host) ||
                       node->device_children != below || (!node->device && below > 0) ||
                       node->begin != node->parent->begin + node->parent->length() ||
                       (node->parent->parent != nullptr && node->lock > node->parent->lock);
    if (wrong) throw Error(ErrorKind::InvariantViolated, "a node of the radix tree contradicts its parent");
  }
  if (evictable != evictable_ || locked != locked_) {
    throw Error(ErrorKind::InvariantViolated, "the radix tree holds ", evictable, " evictable and ", locked,
                " locked tokens, where it counts ", evictable_, " and ", locked_);
  }
}

}  // namespace understudy
