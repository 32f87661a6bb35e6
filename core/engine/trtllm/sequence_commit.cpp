// Commits of a request's blocks to the tree.
#include <algorithm>
#include <utility>

#include "base/errors.hpp"
#include "engine/trtllm/sequence.hpp"

namespace understudy {

void TrtSequence::commit(std::uint32_t to) {
  if (to <= committed_) return;
  committed_ = to;
  if (commit_ == Commit::Prevented) return;
  if (history_ < to && !resize({}, to)) {
    throw Error(ErrorKind::CapacityExhausted, "the history of a request cannot be moved to its committed tokens");
  }
  const std::uint32_t full = to / block_size_;
  for (std::uint32_t block = committed_blocks_; block < full && commit_ == Commit::Allowed; ++block) {
    commit_block(block, false);
  }
  if (reuse_.minimal && commit_ == Commit::Allowed && to % block_size_ != 0) snapshot_part(full);
}

void TrtSequence::stop_committing() {
  if (commit_ == Commit::Allowed && committed_ % block_size_ != 0) {
    commit_block(committed_ / block_size_, true);
  } else if (std::exchange(commit_, Commit::Stopped) == Commit::Allowed) {
    end_commits();
  }
}

// Stale blocks that were held to be committed are released.
void TrtSequence::end_commits() {
  commit_ = Commit::Stopped;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    for (std::uint32_t block = committed_blocks_; block < stale_end(i, history_); ++block) drop_entry(block, i);
  }
}

// The block of the tree before a block; null: it was removed, and nothing can be added behind it.
TrtNode* TrtSequence::parent_of(std::uint32_t block) {
  if (block == 0) return &tree_.root(scope_);
  TrtNode* const parent = nodes_[block - 1];
  return parent == nullptr || parent->removed() || !tree_.is_full(*parent) ? nullptr : parent;
}

void TrtSequence::commit_block(std::uint32_t block, bool is_last) {
  const std::uint32_t begin = block * block_size_;
  const std::uint32_t end = std::min(begin + block_size_, committed_);
  TrtNode* const parent = parent_of(block);
  bool done = false;
  // A partly matched block of a request that never ran has the pages of another.
  if (parent != nullptr && (nodes_[block] == nullptr || was_resumed_)) {
    const auto [node, is_new] = tree_.add(*parent, tokens_, begin, end);
    if (is_new) {
      done = add_block_pages(block, *node);
    } else if (tree_.is_full(*node) && end - begin == block_size_) {
      rebase(block, *node, end - begin);
      done = true;
    }
  }
  if (done) committed_blocks_ = block + 1;
  if (nodes_[block] != nullptr) {
    for (std::size_t i = 0; i < num_life_cycles_; ++i) {
      if (is_stale(i, block)) drop_entry(block, i);
    }
  }
  if (is_last || !done) end_commits();
}

bool TrtSequence::add_block_pages(std::uint32_t block, TrtNode& node) {
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    TrtPage* const page = entry(block, i).page;
    if (page == nullptr) continue;
    if (page->listed) store_.unlist(*page);
    page->committed = true;
    page->covered = node.tokens.size();
    tree_.put_page(node, *page);
  }
  set_node(block, &node);
  if (tree_.events() != nullptr) tree_.events()->stored(node);
  return true;
}

// Another request has committed the same tokens: its pages replace ours.
void TrtSequence::rebase(std::uint32_t block, TrtNode& node, std::uint32_t tokens) {
  const TrtNodeRef keep(tree_, &node);
  std::vector<TrtPage*> theirs;
  std::vector<std::size_t> of;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    Entry& here = entry(block, i);
    if (here.page == nullptr) continue;
    TrtPage& ours = *here.page;
    TrtPage* const existing = node.covered(i) >= tokens ? node.pages[i] : nullptr;
    if (existing == nullptr) {
      if (ours.listed) store_.unlist(ours);
      ours.committed = true;
      ours.covered = tokens;
      tree_.put_page(node, ours);
      if (tree_.events() != nullptr) tree_.events()->stored_of(node, i);
      continue;
    }
    if (std::exchange(here.locked, false)) {
      ++ours.holds;
      store_.unlock(ours);
    }
    theirs.push_back(existing);
    of.push_back(i);
  }
  if (!theirs.empty() && !store_.lock_all(theirs)) {
    throw Error(ErrorKind::CapacityExhausted, "a block that another request has committed cannot return to the device");
  }
  for (std::size_t n = 0; n < of.size(); ++n) {
    const Entry old = std::exchange(entry(block, of[n]), Entry{theirs[n], true});
    store_.release(*old.page);
  }
  set_node(block, &node);
}

// Adds a copy of the incomplete last block to the tree; the request keeps its own.
void TrtSequence::snapshot_part(std::uint32_t block) {
  TrtNode* const parent = parent_of(block);
  if (parent == nullptr) return;
  const std::uint32_t begin = block * block_size_;
  const auto [node, is_new] = tree_.add(*parent, tokens_, begin, committed_);
  const TrtNodeRef keep(tree_, node);
  std::vector<std::size_t> added;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    const TrtPage* const page = entry(block, i).page;
    if (page == nullptr || node->covered(i) >= committed_ - begin) continue;
    if (copy_to_node(*node, *page, committed_ - begin)) added.push_back(i);
  }
  if (tree_.events() == nullptr) return;
  if (is_new) return tree_.events()->stored(*node);
  for (const std::size_t i : added) tree_.events()->stored_of(*node, i);
}

// On the page's level, or below where there is room.
bool TrtSequence::copy_to_node(TrtNode& node, const TrtPage& from, std::uint32_t tokens) {
  std::vector<std::uint32_t> counts(num_life_cycles_, 0);
  counts[from.life_cycle] = 1;
  for (std::size_t level = from.level; level < store_.num_levels(); ++level) {
    TrtStore::Slots slots;
    if (!store_.take_slots(level, counts, slots)) {
      store_.drop_lost();
      continue;
    }
    store_.note_copy(from.life_cycle, from.level, level);
    TrtPage& copy = store_.make_page(from.life_cycle, level, slots[from.life_cycle].front());
    copy.committed = true;
    copy.covered = tokens;
    tree_.put_page(node, copy);
    store_.list_if_evictable(copy);
    return true;
  }
  return false;
}

}  // namespace understudy
