#include "engine/trtllm/tree.hpp"

#include <algorithm>

#include "base/errors.hpp"
#include "tokens/xxh3.hpp"

namespace understudy {

TrtTree::TrtTree(TrtStore& store, TrtEvents* events, bool partial_reuse)
    : store_(store), events_(events), partial_reuse_(partial_reuse), block_size_(store.layout().tokens_per_block) {
  store.set_tree(*this);
}

TrtNode& TrtTree::make() {
  if (spare_.empty()) spare_.push_back(&all_.emplace_back());
  TrtNode& node = *spare_.back();
  spare_.pop_back();
  node = TrtNode{};
  return node;
}

TrtNode* TrtTree::find_root(const TrtScope& scope) const {
  const auto found = std::ranges::find_if(roots_, [&](const TrtNode* root) { return root->scope == scope; });
  return found == roots_.end() ? nullptr : *found;
}

TrtNode& TrtTree::root(const TrtScope& scope) {
  if (TrtNode* const known = find_root(scope); known != nullptr) return *known;
  TrtNode& root = make();
  root.is_root = true;
  root.scope = scope;
  root.key = xxh3_64_pair(xxh3_64_pair(scope.adapter, scope.has_salt ? 1 : 0, 3), scope.salt, 5);
  roots_.push_back(&root);
  return root;
}

TrtNode* TrtTree::find_child(const TrtNode& parent, std::uint64_t key) const {
  TrtNode** const found = index_.find(key);
  return found != nullptr && (*found)->parent == &parent ? *found : nullptr;
}

void TrtTree::watch(TrtWatcher& watcher) {
  const auto& life_cycles = store_.layout().life_cycles;
  const auto full = std::ranges::find(life_cycles, 0u, &TrtLifeCycle::window);
  watched_ = static_cast<std::size_t>(full - life_cycles.begin());
  watcher_ = &watcher;
}

// ── Match ──

TrtTree::Match TrtTree::match(const TrtScope& scope, const TokenList& tokens, std::uint32_t end) const {
  Match out;
  std::vector<std::uint32_t> lengths;
  TrtNode* node = find_root(scope);
  if (node == nullptr) return out;
  std::uint32_t at = 0;
  while (at < end) {
    const std::uint32_t to = std::min(at + block_size_, end);
    TrtNode* const child = find_child(*node, xxh3_64_pair(node->key, tokens.hash(at, to), to - at));
    if (child == nullptr) break;
    out.blocks.push_back(child);
    lengths.push_back(to - at);
    node = child;
    at = to;
  }
  if (at < end && partial_reuse_ && node->num_children <= kMostChildrenToCompare) {
    TrtNode* best = nullptr;
    std::uint32_t most = 0;
    for (TrtNode* child = node->first_child; child != nullptr; child = child->behind) {
      const std::uint32_t common = tokens.common(at, child->tokens, std::min(block_size_, end - at));
      if (common > most) {
        most = common;
        best = child;
      }
    }
    if (best != nullptr) {
      out.blocks.push_back(best);
      lengths.push_back(most);
    }
  }
  shorten(out, lengths);
  return out;
}

// Shortens a match until every page that its end needs is there: all of full attention, and those in a window.
void TrtTree::shorten(Match& match, std::vector<std::uint32_t>& lengths) const {
  const auto& life_cycles = store_.layout().life_cycles;
  bool again = true;
  while (std::exchange(again, false) && !lengths.empty()) {
    match.tokens = block_size_ * static_cast<std::uint32_t>(lengths.size() - 1) + lengths.back();
    for (std::size_t i = 0; i < life_cycles.size() && !again; ++i) {
      for (std::size_t at = life_cycles[i].stale_end(match.tokens, block_size_); at < lengths.size(); ++at) {
        const std::uint32_t covered = match.blocks[at]->covered(i);
        if (covered >= lengths[at]) continue;
        lengths.resize(covered > 0 ? at + 1 : at);
        if (covered > 0) lengths.back() = covered;
        again = true;
        break;
      }
    }
  }
  match.blocks.resize(lengths.size());
  if (lengths.empty()) match.tokens = 0;
}

// ── Blocks ──

TrtTree::Added TrtTree::add(TrtNode& parent, const TokenList& tokens, std::uint32_t from, std::uint32_t to) {
  const std::uint32_t count = to - from;
  const std::uint64_t key = xxh3_64_pair(parent.key, tokens.hash(from, to), count);
  if (TrtNode* const there = find_child(parent, key); there != nullptr) return {there, false};
  if (count < block_size_) {
    for (TrtNode* child = parent.first_child; child != nullptr; child = child->behind) {
      if (tokens.common(from, child->tokens, count) == count) return {child, false};
    }
  }
  std::vector<TrtNode*> covered;
  if (parent.short_children > 0) {
    for (TrtNode* child = parent.first_child; child != nullptr; child = child->behind) {
      const std::uint32_t length = child->tokens.size();
      if (length < count && tokens.common(from, child->tokens, length) == length) covered.push_back(child);
    }
  }
  TrtNode& node = make();
  node.key = key;
  node.depth = parent.is_root ? 0 : parent.depth + 1;
  node.tokens = tokens.slice(from, to);
  if (events_ != nullptr) node.hash = events_->hash_of(node.tokens, parent);
  attach(parent, node);
  for (TrtNode* const child : covered) {
    const TrtNodeRef keep(*this, child);
    detach(*child);
    for (std::size_t i = 0; i < store_.num_life_cycles(); ++i) {
      if (TrtPage* const page = child->pages[i]; page != nullptr) {
        unlink(*page);
        put_page(node, *page);
      }
    }
    if (events_ != nullptr) events_->removed({&child->key, 1});
  }
  return {&node, true};
}

void TrtTree::put_page(TrtNode& node, TrtPage& page) {
  TrtPage* const old = node.pages[page.life_cycle];
  if (old != nullptr) {
    unlink(*old);
    if (old->listed) {
      store_.unlist(*old);
      store_.free_if_unused(*old);
    }
  }
  page.node = &node;
  node.pages[page.life_cycle] = &page;
  if (is_watched(page)) watcher_->stored(node, page.level);
}

void TrtTree::unlink(TrtPage& page) {
  if (is_watched(page) && !page.node->removed()) watcher_->removed(*page.node, page.level);
  page.node->pages[page.life_cycle] = nullptr;
  page.node = nullptr;
}

void TrtTree::moved(const TrtPage& page, std::size_t from) {
  if (events_ != nullptr) events_->moved(page.node->key, page.life_cycle, from, page.level);
  if (!is_watched(page)) return;
  watcher_->stored(*page.node, page.level);
  watcher_->removed(*page.node, from);
}

void TrtTree::attach(TrtNode& parent, TrtNode& node) {
  node.parent = &parent;
  node.before = parent.last_child;
  (parent.last_child == nullptr ? parent.first_child : parent.last_child->behind) = &node;
  parent.last_child = &node;
  ++parent.num_children;
  if (!is_full(node)) ++parent.short_children;
  index_[node.key] = &node;
  refer(node);
  if (watcher_ != nullptr && watched_ == store_.num_life_cycles() && is_full(node)) watcher_->stored(node, 0);
}

// The caller keeps the block, or its memory may go.
void TrtTree::detach(TrtNode& node) {
  TrtNode& parent = *node.parent;
  if (watcher_ != nullptr && watched_ == store_.num_life_cycles()) {
    if (is_full(node)) watcher_->removed(node, 0);
  } else if (watcher_ != nullptr && node.pages[watched_] != nullptr && is_watched(*node.pages[watched_])) {
    watcher_->removed(node, node.pages[watched_]->level);
  }
  (node.before == nullptr ? parent.first_child : node.before->behind) = node.behind;
  (node.behind == nullptr ? parent.last_child : node.behind->before) = node.before;
  --parent.num_children;
  if (!is_full(node)) --parent.short_children;
  if (TrtNode** const found = index_.find(node.key); found != nullptr && *found == &node) index_.erase(node.key);
  node.parent = node.before = node.behind = nullptr;
  drop(node);
}

// Children before parents.
void TrtTree::remove_subtree(TrtNode& top) {
  std::vector<std::uint64_t> keys;
  const TrtNodeRef keep_top(*this, &top);
  TrtNodeRef detached(*this, nullptr);
  TrtNode* node = &top;
  while (true) {
    if (node->first_child != nullptr) {
      node = node->first_child;
      continue;
    }
    keys.push_back(node->key);
    if (node->removed()) break;  // the top, held by a request
    TrtNode* const parent = node->parent;
    const TrtNodeRef keep(*this, node);
    detach(*node);
    detached.reset(node);
    if (node == &top) break;
    node = parent;
  }
  if (events_ != nullptr) events_->removed(keys);
}

void TrtTree::remove_stale(TrtNode& start, std::size_t life_cycle) {
  if (store_.layout().life_cycles[life_cycle].window == 0) {
    remove_subtree(start);
  } else if (events_ != nullptr) {
    events_->removed_of(start.key, life_cycle);
  }
  TrtNodeRef node(*this, &start);
  while (!(*node).is_root && (*node).pages[life_cycle] == nullptr && (*node).num_children == 0 && !(*node).removed()) {
    TrtNode* const parent = (*node).parent;
    detach(*node);
    if (events_ != nullptr) events_->removed({&(*node).key, 1});
    node.reset(parent);
  }
}

// Its pages are freed, unless requests hold them.
void TrtTree::free(TrtNode& node) {
  for (std::size_t i = 0; i < store_.num_life_cycles(); ++i) {
    TrtPage* const page = node.pages[i];
    if (page == nullptr) continue;
    unlink(*page);
    if (page->droppable() && page->listed) {
      store_.unlist(*page);
      store_.free_if_unused(*page);
    }
  }
  node.tokens = {};
  spare_.push_back(&node);
}

void TrtTree::check() const {
  std::size_t attached = 0;
  for (const TrtNode& node : all_) {
    if (node.is_root || node.parent == nullptr) continue;
    ++attached;
    for (std::size_t i = 0; i < store_.num_life_cycles(); ++i) {
      const TrtPage* const page = node.pages[i];
      if (page != nullptr && (page->node != &node || !page->committed || page->covered > node.tokens.size())) {
        throw Error(ErrorKind::InvariantViolated, "a block of the tree has a page that is not its own");
      }
    }
  }
  if (attached != index_.size()) {
    throw Error(ErrorKind::InvariantViolated, attached, " blocks are in the tree; ", index_.size(), " can be found");
  }
}

}  // namespace understudy
