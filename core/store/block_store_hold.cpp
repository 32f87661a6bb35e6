// References blocks and releases them.
#include <algorithm>

#include "base/assert.hpp"
#include "store/block_pool.hpp"
#include "store/block_store.hpp"

namespace understudy {

void BlockStore::reference(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) warm_slot(pool, slots[i + kAhead]);
    const SlotId id = slots[i];
    if (!slots_[global(pool, id)].registered()) throw Error(ErrorKind::WrongState, "block ", id, " is not registered");
  }
  // Local copies stay in registers.
  Slot* const own = slots_.get() + pool.first;
  freed_.resize(slots.size());
  SlotId* const woken = freed_.data();
  std::size_t count = 0;
  for (const SlotId id : slots) {
    Slot& slot = own[id];
    woken[count] = pool.first + id;
    count += slot.state == SlotState::Inactive ? 1 : 0;
    slot.state = slot.state == SlotState::Inactive ? SlotState::Primary : slot.state;
    ++slot.refs;
  }
  pool.policy->remove_cached(std::span(freed_).first(count));
  freed_.clear();
  pool.moved(count, SlotState::Inactive, SlotState::Primary);
  pool.references += slots.size();
}

void BlockStore::unregister(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  for (const SlotId id : slots) {
    const Slot& slot = slots_[global(pool, id)];
    if (slot.state != SlotState::Primary || pool.config.duplicates == DuplicatePolicy::Allow) {
      throw Error(ErrorKind::WrongState, "block ", id, " cannot be unregistered: it is not registered and referenced");
    }
  }
  events_.begin_call();
  for (const SlotId id : slots) {
    Slot& slot = slots_[pool.first + id];
    if (slot.state != SlotState::Primary) continue;  // named twice
    forget(pool, pool.first + id, true);
    pool.move(slot, SlotState::Mutable);
    UNDERSTUDY_ASSERT(pool.references >= slot.refs, "references of a pool fall below zero");
    pool.references -= slot.refs;
  }
}

Slot& BlockStore::referenced(const Pool& pool, SlotId id) {
  Slot& slot = slots_[global(pool, id)];
  if (slot.registered() && slot.refs > 0) return slot;
  throw Error(ErrorKind::WrongState, "block ", id, " is not a referenced registered block");
}

void BlockStore::retain(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::size_t done = 0;
  try {
    for (; done < slots.size(); ++done) {
      ++referenced(pool, slots[done]).refs;
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) --slots_[pool.first + slots[i]].refs;
    throw;
  }
  pool.references += slots.size();
}

void BlockStore::release(std::size_t pool_index, std::span<const SlotId> slots, bool tail_first) {
  const Lock lock(*this);
  release_locked(*pools_[pool_index], slots, tail_first);
}

void BlockStore::release_locked(Pool& pool, std::span<const SlotId> slots, bool tail_first) {
  if (slots.empty()) return;
  const SlotId* const start = tail_first ? slots.data() + slots.size() - 1 : slots.data();
  const std::ptrdiff_t stride = tail_first ? -1 : 1;
  const auto at = [&](std::size_t i) { return start[stride * static_cast<std::ptrdiff_t>(i)]; };

  // Drops are undone if a later id is invalid. The drop that reaches 0 is the slot's last, repeats included.
  std::size_t last = 0;
  std::uint64_t references = 0;
  std::uint64_t cached = 0;
  std::size_t empties = 0;  // freed slots that are not cached are among the first so many
  std::size_t num_freed = 0;
  freed_.resize(slots.size());
  for (std::size_t i = 0; i < std::min(kAhead, slots.size()); ++i) warm_slot(pool, at(i));
  // Local copies stay in registers.
  Slot* const all = slots_.get();
  SlotId* const freed = freed_.data();
  const SlotId first = pool.first;
  const std::uint32_t count = pool.count;
  const std::size_t size = slots.size();
  try {
    for (; last < size; ++last) {
      if (last + kAhead < size && at(last + kAhead) < count) all[first + at(last + kAhead)].warm();
      if (at(last) >= count) refuse_unknown(pool, at(last));
      const SlotId id = first + at(last);
      Slot& slot = all[id];
      if (slot.refs == 0) throw Error(ErrorKind::WrongState, "block ", at(last), " is released but not referenced");
      references += slot.registered() ? 1 : 0;
      if (--slot.refs > 0) continue;
      freed[num_freed++] = id;
      if (slot.state == SlotState::Primary && !slot.reset_on_release) {
        slot.state = SlotState::Inactive;
        ++cached;
      } else {
        empties = num_freed;
      }
    }
  } catch (...) {
    freed_.resize(num_freed);
    for (const SlotId id : freed_) {
      if (slots_[id].state == SlotState::Inactive) slots_[id].state = SlotState::Primary;
    }
    freed_.clear();
    for (std::size_t i = 0; i < last; ++i) ++slots_[pool.first + at(i)].refs;
    throw;
  }
  freed_.resize(num_freed);
  UNDERSTUDY_ASSERT(pool.references >= references, "references of a pool fall below zero");
  pool.references -= references;
  events_.begin_call();
  pool.moved(cached, SlotState::Primary, SlotState::Inactive);
  for (std::size_t i = 0; i < empties; ++i) {
    if (slots_[freed_[i]].state != SlotState::Inactive) after_last_release(pool, freed_[i]);
  }
  pool.policy->insert(freed_);
  freed_.clear();
}

void BlockStore::give_back(std::size_t pool_index, std::span<const SlotId> slots) {
  const Lock lock(*this);
  give_back_locked(*pools_[pool_index], slots);
}

void BlockStore::hand_back(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  if (pool.advised != nullptr) return give_back(pool_index, slots);  // its order depends on the slots' states
  const Lock lock(*this);
  if (slots.size() > pool.in(SlotState::Mutable)) {
    throw Error(ErrorKind::WrongState, slots.size(), " blocks are handed back, but only ", pool.in(SlotState::Mutable),
                " are mutable");
  }
  pool.moved(slots.size(), SlotState::Mutable, SlotState::Reset);
  pool.policy->give_back(slots, pool.first);
}

void BlockStore::give_back_locked(Pool& pool, std::span<const SlotId> slots) {
  std::size_t done = 0;
  // Local copies stay in registers.
  Slot* const all = slots_.get();
  const SlotId first = pool.first;
  const std::uint32_t count = pool.count;
  const std::size_t size = slots.size();
  try {
    for (; done < size; ++done) {
      if (done + kAhead < size && slots[done + kAhead] < count) all[first + slots[done + kAhead]].warm();
      if (slots[done] >= count) refuse_unknown(pool, slots[done]);
      Slot& slot = all[first + slots[done]];
      if (slot.state != SlotState::Mutable || slot.refs != 1) {
        throw Error(ErrorKind::WrongState, "block ", slots[done], " is not mutable, or is named twice");
      }
      slot.state = SlotState::Reset;
      slot.refs = 0;
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) {
      slots_[pool.first + slots[i]].state = SlotState::Mutable;
      slots_[pool.first + slots[i]].refs = 1;
    }
    throw;
  }
  pool.moved(slots.size(), SlotState::Mutable, SlotState::Reset);
  pool.policy->give_back(slots, pool.first);
}

// Resets or caches a slot after its last release. Dropping a duplicate's keep-alive may free its primary too.
void BlockStore::after_last_release(Pool& pool, SlotId id) {
  Slot& slot = slots_[id];
  UNDERSTUDY_ASSERT(slot.refs == 0, "a slot is freed while it is referenced");
  if (slot.state == SlotState::Primary && !slot.reset_on_release) {
    pool.move(slot, SlotState::Inactive);
    return;
  }
  SlotId primary = kNoSlot;
  if (slot.state == SlotState::Claimed) pool.map.erase(BlockIndex::tag(slot.lineage), id);
  if (slot.registered()) {
    if (slot.state == SlotState::Duplicate) primary = pool.map.find(slot.lineage);
    forget(pool, id, true);
  }
  make_reset(pool, id);
  if (primary == kNoSlot) return;
  UNDERSTUDY_ASSERT(pool.references > 0 && slots_[primary].refs > 0, "a primary has lost its keep-alives");
  --pool.references;
  if (--slots_[primary].refs == 0) {
    freed_.push_back(primary);
    after_last_release(pool, primary);
  }
}

void BlockStore::make_reset(Pool& pool, SlotId id) {
  pool.move(slots_[id], SlotState::Reset);
  slots_[id].refs = 0;
}

// Removes the slot's hash from the index and the slot from the ring of copies.
bool BlockStore::forget(Pool& pool, SlotId id, bool announce) {
  return forget(pool, id, BlockIndex::tag(slots_[id].lineage), announce);
}

void BlockStore::leave_twins(Pool& pool, SlotId id, std::uint32_t tag) {
  UNDERSTUDY_ASSERT(slots_[id].twinned, "a slot without copies leaves a ring of copies");
  const SlotId before = details_[id].twin_prev;
  const SlotId after = details_[id].twin_next;
  if (pool.map.find(slots_[id].lineage, tag) == id) pool.map.replace(tag, id, after);
  details_[before].twin_next = after;
  details_[after].twin_prev = before;
  slots_[id].twinned = false;
  slots_[after].twinned = after != before;
}

void BlockStore::set_reset_on_release(std::size_t pool_index, std::span<const SlotId> slots, bool value) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  for (const SlotId id : slots) (void)referenced(pool, id);
  for (const SlotId id : slots) slots_[pool.first + id].reset_on_release = value;
}

std::size_t BlockStore::clear_inactive(std::size_t pool_index) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  events_.begin_call();
  for (SlotId id = pool.first; id < pool.used_end(); ++id) {
    if (slots_[id].state != SlotState::Inactive) continue;
    pool.policy->remove(id);
    forget(pool, id, true);
    make_reset(pool, id);
    freed_.push_back(id);
  }
  const std::size_t cleared = freed_.size();
  pool.policy->insert(freed_);
  freed_.clear();
  return cleared;
}

}  // namespace understudy
