#include "engine/trtllm/sequence.hpp"

#include <algorithm>
#include <utility>

#include "base/errors.hpp"

namespace understudy {

TrtSequence::TrtSequence(TrtStore& store, TrtTree& tree, const TrtReuse& reuse, const TrtScope& scope,
                         const TokenList& tokens, std::uint32_t match_end)
    : store_(store),
      tree_(tree),
      reuse_(reuse),
      scope_(scope),
      tokens_(tokens),
      block_size_(store.layout().tokens_per_block),
      num_life_cycles_(store.num_life_cycles()),
      scratch_enabled_(reuse.swa_scratch),
      scratch_(num_life_cycles_) {
  if (match_end == 0) return;
  const TrtTree::Match found = tree.match(scope, tokens, match_end);
  capacity_ = history_ = committed_ = found.tokens;
  committed_blocks_ = found.tokens / block_size_;
  nodes_.assign(found.blocks.size(), nullptr);
  entries_.resize(found.blocks.size() * num_life_cycles_);
  for (std::uint32_t block = 0; block < num_blocks(); ++block) set_node(block, found.blocks[block]);
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    for (std::uint32_t block = stale_end(i, history_); block < num_blocks(); ++block) {
      TrtPage& page = *nodes_[block]->pages[i];
      store_.hold(page);
      entry(block, i).page = &page;
    }
  }
}

void TrtSequence::set_node(std::uint32_t block, TrtNode* node) {
  if (node != nullptr) tree_.refer(*node);
  if (TrtNode* const old = std::exchange(nodes_[block], node); old != nullptr) tree_.drop(*old);
}

// ── Blocks that are needed ──

TrtSequence::Range TrtSequence::scratch_range(std::size_t life_cycle, std::uint32_t capacity,
                                              std::uint32_t history) const {
  if (!scratch_enabled_ || store_.layout().life_cycles[life_cycle].window == 0) return {};
  return {blocks_of(history), std::min(stale_end(life_cycle, capacity), blocks_of(capacity))};
}

// One layer at a time uses them, and a slot has room for all layers.
std::uint32_t TrtSequence::scratch_slots(std::size_t life_cycle, Range range) const {
  const std::uint32_t layers = store_.layout().life_cycles[life_cycle].layers;
  return (range.size() + layers - 1) / layers;
}

// Places in the order in which they are locked: life cycle by life cycle.
std::vector<TrtSequence::Place> TrtSequence::active_places() const {
  std::vector<Place> out;
  for (std::uint32_t i = 0; i < num_life_cycles_; ++i) {
    const Range scratch = scratch_range(i, capacity_, history_);
    for (std::uint32_t block = stale_end(i, history_); block < num_blocks(); ++block) {
      if (!scratch.contains(block)) out.push_back({block, i, entry(block, i).page});
    }
  }
  return out;
}

// ── Suspend, resume ──

void TrtSequence::suspend() {
  for (const Place& place : active_places()) {
    entry(place.block, place.life_cycle).locked = false;
    ++place.page->holds;
    store_.unlock(*place.page);
  }
  free_scratch();
  active_ = false;
}

bool TrtSequence::resume() {
  if (store_.utilization() > reuse_.max_util_for_resume) return false;
  const bool has_part = !was_resumed_ && committed_ % block_size_ != 0;
  std::vector<std::optional<std::uint32_t>> copies(num_life_cycles_);
  if (!take_for_resume(copies, has_part)) {
    store_.drop_lost();
    return false;
  }
  const std::vector<Place> places = active_places();
  std::vector<TrtPage*> pages;
  pages.reserve(places.size());
  for (const Place& place : places) pages.push_back(place.page);
  if (!store_.lock_all(pages)) {
    for (std::size_t i = 0; i < num_life_cycles_; ++i) {
      if (copies[i]) store_.give_slot(i, 0, *copies[i]);
    }
    store_.drop_lost();
    return false;
  }
  for (const Place& place : places) {
    entry(place.block, place.life_cycle).locked = true;
    --place.page->holds;
  }
  if (has_part) copy_part(copies);
  was_resumed_ = true;
  active_ = true;
  return true;
}

// Takes slots before anything is locked: one per life cycle for the copy of a partly matched block, and scratch.
bool TrtSequence::take_for_resume(std::vector<std::optional<std::uint32_t>>& copies, bool has_part) {
  std::vector<std::uint32_t> counts(num_life_cycles_, has_part ? 1 : 0);
  bool any = has_part;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    const std::uint32_t wanted = scratch_slots(i, scratch_range(i, capacity_, history_));
    if (wanted <= scratch_[i].size()) continue;
    counts[i] += wanted - static_cast<std::uint32_t>(scratch_[i].size());
    any = true;
  }
  if (!any) return true;
  TrtStore::Slots slots;
  if (!store_.take_slots(0, counts, slots)) return false;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    if (has_part) {
      copies[i] = slots[i].back();
      slots[i].pop_back();
    }
    scratch_[i].insert(scratch_[i].end(), slots[i].begin(), slots[i].end());
  }
  return true;
}

// The partly matched block becomes the request's own: a copy that it writes on.
void TrtSequence::copy_part(const std::vector<std::optional<std::uint32_t>>& copies) {
  const std::uint32_t last = (committed_ - 1) / block_size_;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) store_.note_copy(i, 0, 0);
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    const Entry old = std::exchange(entry(last, i), Entry{});
    store_.unlock(*old.page);
  }
  for (std::size_t i = 0; i < num_life_cycles_; ++i) put_locked(last, i, *copies[i]);
  set_node(last, nullptr);
}

void TrtSequence::put_locked(std::uint32_t block, std::size_t life_cycle, std::uint32_t slot) {
  TrtPage& page = store_.make_page(life_cycle, 0, slot);
  store_.lock(page);
  entry(block, life_cycle) = {&page, true};
}

// ── Resize ──

// Sets lengths that need no other blocks. The capacity is set even if the history needs more.
bool TrtSequence::set_without_effect(std::uint32_t capacity, std::uint32_t history) {
  if (blocks_of(capacity) != blocks_of(capacity_)) return false;
  capacity_ = capacity;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    if (stale_end(i, history) != stale_end(i, history_)) return false;
  }
  history_ = history;
  return true;
}

bool TrtSequence::resize(std::optional<std::uint32_t> capacity, std::optional<std::uint32_t> history) {
  const std::uint32_t new_capacity = capacity.value_or(capacity_);
  const std::uint32_t new_history = history.value_or(history_);
  if (new_history < history_ || new_capacity < new_history) {
    throw Error(ErrorKind::InvalidArgument, "history: ", new_history, " is not between ", history_, " and ",
                new_capacity);
  }
  if (!scratch_enabled_ && set_without_effect(new_capacity, new_history)) return true;
  const std::vector<Place> unlocked = unlock_stale(new_history);
  const std::uint32_t blocks = blocks_of(new_capacity);
  while (num_blocks() > blocks) drop_last_block();
  if (!grow(blocks, new_capacity, new_history)) {
    lock_again(unlocked);
    store_.drop_lost();
    return false;
  }
  capacity_ = new_capacity;
  history_ = new_history;
  for (auto place = unlocked.rbegin(); place != unlocked.rend(); ++place) store_.release(*place->page);
  return true;
}

// Blocks that leave a window: dropped, or held until they are committed. Each is held by the result as well.
std::vector<TrtSequence::Place> TrtSequence::unlock_stale(std::uint32_t history) {
  std::vector<Place> out;
  if (history == history_) return out;
  for (std::uint32_t i = 0; i < num_life_cycles_; ++i) {
    const std::uint32_t end = std::min(num_blocks(), stale_end(i, history));
    for (std::uint32_t block = stale_end(i, history_); block < end; ++block) {
      Entry& here = entry(block, i);
      if (here.page == nullptr) continue;
      TrtPage& page = *here.page;
      out.push_back({block, i, &page});
      ++page.holds;
      const bool waits_for_commit = !reuse_.minimal && nodes_[block] == nullptr && commit_ == Commit::Allowed;
      if (waits_for_commit) ++page.holds;
      here = {waits_for_commit ? &page : nullptr, false};
      store_.unlock(page);
    }
  }
  return out;
}

void TrtSequence::lock_again(const std::vector<Place>& places) {
  if (places.empty()) return;
  std::vector<TrtPage*> pages;
  for (const Place& place : places) pages.push_back(place.page);
  if (!store_.lock_all(pages)) {
    throw Error(ErrorKind::CapacityExhausted, "pages that left the window of a request cannot return to the device");
  }
  for (const Place& place : places) {
    Entry& here = entry(place.block, place.life_cycle);
    place.page->holds -= here.page == nullptr ? 1 : 2;
    here = {place.page, true};
  }
}

bool TrtSequence::grow(std::uint32_t blocks, std::uint32_t capacity, std::uint32_t history) {
  const std::uint32_t old = num_blocks();
  std::vector<std::uint32_t> counts(num_life_cycles_, 0);
  TrtStore::Slots excess(num_life_cycles_);
  bool any = false;
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    const Range scratch = scratch_range(i, capacity, history);
    std::uint32_t wanted = scratch_slots(i, scratch);
    for (; scratch_[i].size() > wanted; scratch_[i].pop_back()) excess[i].push_back(scratch_[i].back());
    wanted -= static_cast<std::uint32_t>(scratch_[i].size());
    if (scratch_enabled_) {
      const Range in_new{std::max(scratch.begin, old), std::min(scratch.end, blocks)};
      wanted += blocks - old - in_new.size();
    } else {
      wanted += blocks - std::min(blocks, std::max(stale_end(i, history), old));
    }
    counts[i] = wanted;
    any |= wanted > excess[i].size();
  }
  TrtStore::Slots slots(num_life_cycles_);
  std::vector<std::uint32_t> more(num_life_cycles_, 0);
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    if (counts[i] > excess[i].size()) more[i] = counts[i] - static_cast<std::uint32_t>(excess[i].size());
  }
  if (any && !store_.take_slots(0, more, slots)) {
    for (std::size_t i = 0; i < num_life_cycles_; ++i) {
      scratch_[i].insert(scratch_[i].end(), excess[i].begin(), excess[i].end());
    }
    return false;
  }
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    slots[i].insert(slots[i].end(), excess[i].begin(), excess[i].end());
    for (; slots[i].size() > counts[i]; slots[i].pop_back()) store_.give_slot(i, 0, slots[i].back());
  }
  add_blocks(blocks, capacity, history, slots);
  return true;
}

// New blocks take their slots from the last one.
void TrtSequence::add_blocks(std::uint32_t blocks, std::uint32_t capacity, std::uint32_t history,
                             TrtStore::Slots& slots) {
  std::vector<Range> scratch(num_life_cycles_);
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    scratch[i] = scratch_range(i, capacity, history);
    for (const std::uint32_t wanted = scratch_slots(i, scratch[i]); scratch_[i].size() < wanted; slots[i].pop_back()) {
      scratch_[i].push_back(slots[i].back());
    }
  }
  const std::uint32_t old = num_blocks();
  nodes_.resize(blocks, nullptr);
  entries_.resize(blocks * num_life_cycles_);
  for (std::uint32_t block = old; block < blocks; ++block) {
    for (std::size_t i = 0; i < num_life_cycles_; ++i) {
      const bool without_page = scratch_enabled_ ? scratch[i].contains(block) : block < stale_end(i, history);
      if (without_page) continue;
      put_locked(block, i, slots[i].back());
      slots[i].pop_back();
    }
  }
}

// ── Release ──

void TrtSequence::drop_entry(std::uint32_t block, std::size_t life_cycle) {
  const Entry old = std::exchange(entry(block, life_cycle), Entry{});
  if (old.page == nullptr) return;
  if (old.locked) {
    store_.unlock(*old.page);
  } else {
    store_.release(*old.page);
  }
}

void TrtSequence::drop_last_block() {
  const std::uint32_t last = num_blocks() - 1;
  set_node(last, nullptr);
  for (std::size_t i = num_life_cycles_; i-- > 0;) drop_entry(last, i);
  nodes_.pop_back();
  entries_.resize(last * num_life_cycles_);
}

void TrtSequence::free_scratch() {
  for (std::size_t i = 0; i < num_life_cycles_; ++i) {
    for (const std::uint32_t slot : std::exchange(scratch_[i], {})) store_.give_slot(i, 0, slot);
  }
}

void TrtSequence::close() {
  if (std::exchange(closed_, true)) return;
  stop_committing();
  while (num_blocks() > 0) drop_last_block();
  free_scratch();
  active_ = false;
}

void TrtSequence::check() const {
  if (committed_ > history_ || history_ > capacity_ || num_blocks() != blocks_of(capacity_)) {
    throw Error(ErrorKind::InvariantViolated, "a cache of ", num_blocks(), " blocks has ", committed_,
                " committed tokens, a history of ", history_, " and a capacity of ", capacity_);
  }
  for (const Place& place : active_places()) {
    const Entry& here = entry(place.block, place.life_cycle);
    if (here.page != nullptr && here.locked == active_ && here.page->life_cycle == place.life_cycle) continue;
    throw Error(ErrorKind::InvariantViolated, "block ", place.block,
                " of a cache has no page, or one in a wrong state");
  }
}

}  // namespace understudy
