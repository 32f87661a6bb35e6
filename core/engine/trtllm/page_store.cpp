#include "engine/trtllm/page_store.hpp"

#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/trtllm/tree.hpp"

namespace understudy {

TrtStore::TrtStore(const TrtLayout& layout) : layout_(layout) {
  for (const auto& level : layout.levels) {
    std::vector<Pool>& pools = levels_.emplace_back();
    for (const std::uint32_t pages : level) pools.push_back({TrtSlots(pages), {}});
  }
}

double TrtStore::utilization() const {
  double most = 0;
  for (const Pool& pool : levels_[0]) {
    const double used = pool.slots.total() - pool.slots.num_free() - static_cast<double>(pool.list.size());
    most = std::max(most, used / pool.slots.total());
  }
  return most;
}

// ── Pages ──

TrtPage& TrtStore::make_page(std::size_t life_cycle, std::size_t level, std::uint32_t slot) {
  if (spare_.empty()) spare_.push_back(&all_.emplace_back());
  TrtPage& page = *spare_.back();
  spare_.pop_back();
  page = TrtPage{};
  page.life_cycle = static_cast<std::uint8_t>(life_cycle);
  page.level = static_cast<std::uint8_t>(level);
  page.slot = slot;
  return page;
}

// Its slot is free before its block goes, and with it the pages of other life cycles; blocks behind go first.
void TrtStore::free(TrtPage& page) {
  UNDERSTUDY_ASSERT(page.droppable() && !page.listed, "a page is freed that is in use");
  if (page.committed) ++dropped_;
  const TrtNodeRef node(*tree_, page.node);
  if (page.node != nullptr) {
    tree_->unlink(page);
    tree_->remove_stale(*node, page.life_cycle);
  }
  give_slot(page.life_cycle, page.level, page.slot);
  spare_.push_back(&page);
}

void TrtStore::hold(TrtPage& page) {
  ++page.holds;
  if (page.listed && !is_evictable(page)) unlist(page);
}

void TrtStore::release(TrtPage& page) {
  --page.holds;
  if (!page.droppable()) return;
  if (page.committed && !page.listed) list_if_evictable(page);
  const bool unreachable = !page.committed || page.node == nullptr || page.node->removed();
  if (unreachable && page.listed) unlist(page);
  free_if_unused(page);
}

void TrtStore::lock(TrtPage& page) {
  UNDERSTUDY_ASSERT(page.level == 0, "a page below the device is locked");
  ++page.locks;
  if (page.listed) unlist(page);
}

void TrtStore::unlock(TrtPage& page) {
  if (--page.locks > 0) return;
  if (page.holds > 0) return list_if_evictable(page);
  page.holds = 1;
  release(page);
}

bool TrtStore::lock_all(std::span<TrtPage* const> pages) {
  std::vector<bool> were_listed;
  were_listed.reserve(pages.size());
  Counts needs(layout_.num_groups(), 0);
  for (TrtPage* const page : pages) {
    were_listed.push_back(page->listed);
    if (page->listed) unlist(*page);
    if (page->level > 0) ++needs[layout_.life_cycles[page->life_cycle].group];
  }
  if (!prepare(0, needs)) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (were_listed[i]) list_if_evictable(*pages[i]);
    }
    return false;
  }
  if (std::ranges::any_of(pages, [](const TrtPage* page) { return page->level > 0; })) {
    std::vector<TrtPage*> below;
    std::ranges::copy_if(pages, std::back_inserter(below), [](const TrtPage* page) { return page->level > 0; });
    move(below, 0);
  }
  for (TrtPage* const page : pages) lock(*page);
  return true;
}

// ── Room ──

bool TrtStore::take_slots(std::size_t level, std::span<const std::uint32_t> by_life_cycle, Slots& out) {
  Counts needs(layout_.num_groups(), 0);
  bool fits = true;
  for (std::size_t i = 0; i < by_life_cycle.size(); ++i) {
    const std::uint32_t group = layout_.life_cycles[i].group;
    needs[group] += by_life_cycle[i];
    fits &= needs[group] <= levels_[level][group].slots.num_free();
  }
  if (!fits && !prepare(level, needs)) return false;
  out.assign(by_life_cycle.size(), {});
  for (std::size_t i = 0; i < by_life_cycle.size(); ++i) {
    for (std::uint32_t n = 0; n < by_life_cycle[i]; ++n) out[i].push_back(pool(level, i).slots.take());
  }
  return true;
}

bool TrtStore::prepare(std::size_t level, const Counts& needs) {
  Pages fallen(layout_.num_groups());
  if (make_room(level, needs, fallen)) return true;
  lose(fallen);
  return false;
}

// Frees `goals` slots of a level, and takes in as many of the pages that have fallen from above as fit. Those that do
// not fit fall further; behind the last level they are dropped, unless a request holds them.
bool TrtStore::make_room(std::size_t level, const Counts& goals, Pages& fallen) {
  const bool is_last = level + 1 == levels_.size();
  std::vector<Pool>& pools = levels_[level];
  Counts to_evict(pools.size(), 0);
  Pages held(pools.size());
  for (std::size_t group = 0; group < pools.size(); ++group) {
    const std::uint64_t goal = goals[group];
    const std::uint64_t free = pools[group].slots.num_free();
    const std::uint64_t evictable = pools[group].list.size();
    const std::uint64_t wanted = goal + fallen[group].size();
    to_evict[group] = static_cast<std::uint32_t>(wanted > free ? std::min(wanted - free, evictable) : 0);
    if (is_last) {
      std::ranges::copy_if(fallen[group], std::back_inserter(held[group]), [](const auto* one) { return one->held(); });
      std::erase_if(fallen[group], [](const auto* one) { return one->held(); });
    }
    if (free + evictable < held[group].size() + goal) return false;
  }
  Pages evicted(pools.size());
  for (std::size_t group = 0; group < pools.size(); ++group) evicted[group] = evict(pools[group], to_evict[group]);
  Pages accepted(pools.size());
  for (std::size_t group = 0; group < pools.size(); ++group) {
    std::vector<TrtPage*>& here = fallen[group];
    if (is_last) {
      accepted[group] = accept_at_last(pools[group], goals[group], evicted[group], here, held[group]);
      continue;
    }
    const std::size_t room = pools[group].slots.num_free() + evicted[group].size() - goals[group];
    here.insert(here.begin(), evicted[group].begin(), evicted[group].end());
    const auto first = here.end() - static_cast<std::ptrdiff_t>(std::min(room, here.size()));
    accepted[group].assign(first, here.end());
    here.erase(first, here.end());
  }
  if (!is_last && !make_room(level + 1, Counts(pools.size(), 0), fallen)) {
    lose(accepted);
    return false;
  }
  for (const std::vector<TrtPage*>& pages : accepted) accept(level, pages);
  return true;
}

std::vector<TrtPage*> TrtStore::evict(Pool& from, std::uint32_t count) {
  std::vector<TrtPage*> out;
  while (out.size() < count) {
    out.push_back(from.list.front());
    from.list.remove(*out.back());
  }
  return out;
}

// Drops the evicted pages, and of the fallen ones the oldest, if not all fit.
std::vector<TrtPage*> TrtStore::accept_at_last(Pool& pool, std::uint32_t goal, std::vector<TrtPage*>& evicted,
                                               std::vector<TrtPage*>& fallen, const std::vector<TrtPage*>& held) {
  free_all(evicted);
  fallen.insert(fallen.end(), held.begin(), held.end());
  const std::size_t room = std::min<std::size_t>(pool.slots.num_free() - goal, fallen.size());
  std::vector<TrtPage*> accepted(fallen.end() - static_cast<std::ptrdiff_t>(room), fallen.end());
  fallen.resize(fallen.size() - room);
  free_all(fallen);
  return accepted;
}

void TrtStore::accept(std::size_t level, std::span<TrtPage* const> pages) {
  if (pages.empty()) return;
  move(pages, level);
}

// Moves pages of one group each from its level to another, by source level.
void TrtStore::move(std::span<TrtPage* const> pages, std::size_t level) {
  // By level and group, in the order in which they first appear.
  std::vector<std::pair<std::uint32_t, std::vector<TrtPage*>>> parts;
  for (TrtPage* const page : pages) {
    const std::uint32_t group = layout_.life_cycles[page->life_cycle].group;
    const std::uint32_t part = page->level * 64u + group;
    auto found = std::ranges::find(parts, part, &std::pair<std::uint32_t, std::vector<TrtPage*>>::first);
    if (found == parts.end()) found = parts.insert(parts.end(), {part, {}});
    found->second.push_back(page);
  }
  const bool downwards = level > 0;
  const bool is_last = level + 1 == levels_.size();
  for (auto& [part, of_part] : parts) {
    const std::uint32_t group = part % 64;
    const std::uint32_t from = part / 64;
    Pool& to_pool = levels_[level][group];
    Pool& from_pool = levels_[from][group];
    copies_.push_back({static_cast<std::uint8_t>(from), static_cast<std::uint8_t>(level),
                       static_cast<std::uint32_t>(of_part.size()), layout_.page_bytes[group]});
    std::vector<std::uint32_t> slots(of_part.size());
    std::ranges::generate(slots, [&] { return to_pool.slots.take(); });
    for (std::size_t i = 0; i < of_part.size(); ++i) {
      TrtPage& page = *of_part[i];
      from_pool.slots.give(page.slot);
      page.slot = slots[i];
      page.level = static_cast<std::uint8_t>(level);
      if (page.node != nullptr && !page.node->removed()) tree_->moved(page, from);
    }
    if (!downwards) continue;
    for (TrtPage* const page : of_part) {
      if (!(is_last && page->held())) to_pool.list.push_back(*page);
    }
  }
}

void TrtStore::note_copy(std::size_t life_cycle, std::size_t from, std::size_t to) {
  copies_.push_back({static_cast<std::uint8_t>(from), static_cast<std::uint8_t>(to), 1,
                     layout_.page_bytes[layout_.life_cycles[life_cycle].group]});
}

// The last one first, as a list of Python is cleared.
void TrtStore::free_all(std::vector<TrtPage*>& pages) {
  for (; !pages.empty(); pages.pop_back()) free_if_unused(*pages.back());
}

void TrtStore::lose(Pages& pages) {
  for (auto group = pages.rbegin(); group != pages.rend(); ++group) {
    lost_.insert(lost_.end(), group->rbegin(), group->rend());
    group->clear();
  }
}

void TrtStore::drop_lost() {
  for (TrtPage* const page : std::exchange(lost_, {})) free_if_unused(*page);
}

void TrtStore::drop_unused() {
  for (std::vector<Pool>& pools : levels_) {
    for (Pool& pool : pools) {
      for (TrtPage* page = pool.list.front(); page != nullptr;) {
        TrtPage* const next = page->behind;
        if (page->droppable()) {
          unlist(*page);
          free_if_unused(*page);
          page = pool.list.front();  // others may have gone with it
        } else {
          page = next;
        }
      }
    }
  }
}

void TrtStore::check() const {
  for (std::size_t level = 0; level < levels_.size(); ++level) {
    for (std::size_t group = 0; group < levels_[level].size(); ++group) {
      const Pool& pool = levels_[level][group];
      std::size_t count = 0;
      for (const TrtPage* page = pool.list.front(); page != nullptr; page = page->behind, ++count) {
        if (page->level == level && page->listed && is_evictable(*page)) continue;
        throw Error(ErrorKind::InvariantViolated, "page ", page->slot, " of level ", level,
                    " is in the eviction list, and cannot be evicted");
      }
      if (count != pool.list.size() || pool.slots.num_free() > pool.slots.total()) {
        throw Error(ErrorKind::InvariantViolated, "level ", level, ", group ", group, ": ", count,
                    " pages are listed, and ", pool.list.size(), " counted");
      }
    }
  }
}

}  // namespace understudy
