// Pages of all levels: slots, eviction lists, and moves between levels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/trtllm/layout.hpp"
#include "engine/trtllm/page.hpp"

namespace understudy {

class TrtTree;

// Slots of one group on one level.
class TrtSlots {
 public:
  explicit TrtSlots(std::uint32_t total) : total_(total) {}

  std::uint32_t total() const noexcept { return total_; }
  std::uint32_t num_free() const noexcept { return total_ - used_; }
  // Released slots first, the first released first.
  std::uint32_t take() {
    ++used_;
    if (released_.empty()) return fresh_++;
    const std::uint32_t slot = released_.front();
    released_.pop_front();
    return slot;
  }
  void give(std::uint32_t slot) {
    --used_;
    released_.push_back(slot);
  }

 private:
  std::uint32_t total_;
  std::uint32_t used_ = 0;
  std::uint32_t fresh_ = 0;
  std::deque<std::uint32_t> released_;
};

// A copy of pages from one level to another, or within the device.
struct TrtCopy {
  std::uint8_t from = 0;
  std::uint8_t to = 0;
  std::uint32_t pages = 0;
  std::uint64_t page_bytes = 0;
};

class TrtStore {
 public:
  using Slots = std::vector<std::vector<std::uint32_t>>;  // by life cycle

  explicit TrtStore(const TrtLayout& layout);
  TrtStore(const TrtStore&) = delete;
  TrtStore& operator=(const TrtStore&) = delete;

  void set_tree(TrtTree& tree) noexcept { tree_ = &tree; }
  const TrtLayout& layout() const noexcept { return layout_; }
  std::size_t num_life_cycles() const noexcept { return layout_.life_cycles.size(); }
  std::size_t num_levels() const noexcept { return levels_.size(); }
  bool has_lower_level() const noexcept { return levels_.size() > 1; }
  const TrtSlots& slots(std::size_t level, std::size_t group) const { return levels_[level][group].slots; }
  std::size_t num_evictable(std::size_t level, std::size_t group) const { return levels_[level][group].list.size(); }
  std::size_t num_pages() const noexcept { return all_.size() - spare_.size(); }
  // Largest share of a group's device pages that are neither free nor evictable.
  double utilization() const;

  // ── Slots. All or nothing; false: out of pages, and `drop_lost` is due. ──
  bool take_slots(std::size_t level, std::span<const std::uint32_t> by_life_cycle, Slots& out);
  void give_slot(std::size_t life_cycle, std::size_t level, std::uint32_t slot) {
    pool(level, life_cycle).slots.give(slot);
  }
  // Free pages that a failed move had taken off its list.
  void drop_lost();

  // ── Pages ──
  TrtPage& make_page(std::size_t life_cycle, std::size_t level, std::uint32_t slot);
  bool is_evictable(const TrtPage& page) const noexcept {
    return page.droppable() ? page.committed : page.held() && page.level + 1u < levels_.size();
  }
  void list_if_evictable(TrtPage& page) {
    if (is_evictable(page)) pool(page).list.push_back(page);
  }
  void unlist(TrtPage& page) { pool(page).list.remove(page); }
  // Free a page that nothing refers to.
  void free_if_unused(TrtPage& page) {
    if (page.droppable() && !page.listed) free(page);
  }
  void hold(TrtPage& page);
  void release(TrtPage& page);
  void lock(TrtPage& page);
  void unlock(TrtPage& page);
  // Locks all pages, and moves those on lower levels to the device. False, with no page locked: out of pages.
  bool lock_all(std::span<TrtPage* const> pages);
  void note_copy(std::size_t life_cycle, std::size_t from, std::size_t to);

  // Drops every page that no request holds.
  void drop_unused();
  std::vector<TrtCopy>& copies() noexcept { return copies_; }
  std::uint64_t num_dropped() const noexcept { return dropped_; }
  void check() const;

 private:
  struct Pool {
    TrtSlots slots;
    TrtPageList list;
  };
  using Counts = std::vector<std::uint32_t>;  // by group
  using Pages = std::vector<std::vector<TrtPage*>>;

  Pool& pool(std::size_t level, std::size_t life_cycle) {
    return levels_[level][layout_.life_cycles[life_cycle].group];
  }
  Pool& pool(const TrtPage& page) { return pool(page.level, page.life_cycle); }
  bool prepare(std::size_t level, const Counts& needs);
  bool make_room(std::size_t level, const Counts& goals, Pages& fallen);
  std::vector<TrtPage*> evict(Pool& from, std::uint32_t count);
  std::vector<TrtPage*> accept_at_last(Pool& pool, std::uint32_t goal, std::vector<TrtPage*>& evicted,
                                       std::vector<TrtPage*>& fallen, const std::vector<TrtPage*>& held);
  void accept(std::size_t level, std::span<TrtPage* const> pages);
  void move(std::span<TrtPage* const> pages, std::size_t level);
  void free_all(std::vector<TrtPage*>& pages);
  void lose(Pages& pages);
  void free(TrtPage& page);

  TrtLayout layout_;
  std::vector<std::vector<Pool>> levels_;
  TrtTree* tree_ = nullptr;
  std::deque<TrtPage> all_;
  std::vector<TrtPage*> spare_;
  std::vector<TrtPage*> lost_;
  std::vector<TrtCopy> copies_;
  std::uint64_t dropped_ = 0;  // committed pages
};

}  // namespace understudy
