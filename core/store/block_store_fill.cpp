// Fills blocks: stage and register. Blocks that arrive by a copy are claimed first: block_store_claim.cpp.
#include <algorithm>

#include "base/assert.hpp"
#include "store/block_pool.hpp"
#include "store/block_store.hpp"

namespace understudy {

// ── Token ids ──

void BlockStore::check_tokens(std::size_t blocks, std::span<const Token> tokens) const {
  if (tokens.empty()) return;
  const std::size_t expected = blocks * block_size_;
  if (tokens.size() != expected) {
    throw Error(ErrorKind::InvalidArgument, "token_ids must hold ", expected, " tokens for ", blocks, " blocks of ",
                block_size_, ", got ", tokens.size());
  }
}

const Token* BlockStore::find_tokens(const LineageHash& lineage) const noexcept {
  for (const auto& pool : pools_) {
    if (const SlotId id = pool->map.find(lineage); id != kNoSlot) return tokens_at(id);
  }
  return nullptr;
}

// ── Stage and register ──

void BlockStore::stage(std::size_t pool_index, std::span<const SlotId> slots,
                       std::span<const BlockIdentity> identities) {
  const Lock lock(*this);
  stage_locked(*pools_[pool_index], slots, identities);
}

void BlockStore::stage_locked(Pool& pool, std::span<const SlotId> slots, std::span<const BlockIdentity> identities) {
  if (slots.size() != identities.size()) {
    throw Error(ErrorKind::InvalidArgument, "identities must name each of the ", slots.size(), " blocks, got ",
                identities.size());
  }
  std::size_t done = 0;
  tags_.resize(slots.size());
  // Local copies stay in registers.
  Slot* const all = slots_.get();
  SlotDetail* const details = pool.config.keeps_details ? details_.get() : nullptr;
  std::uint32_t* const tags = tags_.data();
  const SlotId first = pool.first;
  const std::uint32_t count = pool.count;
  const Pool* const below = &pool != pools_.back().get() ? pools_.back().get() : nullptr;
  try {
    for (; done < slots.size(); ++done) {
      const SlotId local = slots[done];
      if (local >= count) refuse_unknown(pool, local);
      const SlotId id = first + local;
      Slot& slot = all[id];
      if (slot.state != SlotState::Mutable) {
        throw Error(ErrorKind::WrongState, "block ", local, " is not mutable (or is named twice)");
      }
      if (slot.refs != 1) throw Error(ErrorKind::WrongState, "block ", local, " has other holders");
      const BlockIdentity& identity = identities[done];
      slot.state = SlotState::Staged;
      slot.lineage = identity.lineage;
      if (details != nullptr) {
        details[id].local_hash = identity.local_hash;
        details[id].parent_hash = identity.parent_hash;
      }
      tags[done] = BlockIndex::tag(identity.lineage);
      if (done < kAhead) {
        pool.map.warm(tags[done]);
        if (below != nullptr) below->map.warm(tags[done]);  // a copy to that pool searches it next
      }
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) {
      slots_[pool.first + slots[i]].state = SlotState::Mutable;
    }
    throw;
  }
  pool.moved(slots.size(), SlotState::Mutable, SlotState::Staged);
  pool.counters.stagings += slots.size();
}

void BlockStore::unstage(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  for (const SlotId id : slots) {
    if (slots_[global(pool, id)].state != SlotState::Staged) {
      throw Error(ErrorKind::WrongState, "block ", id, " is not staged");
    }
  }
  for (const SlotId id : slots) {
    Slot& slot = slots_[pool.first + id];
    pool.move(slot, SlotState::Mutable);
    slot.reset_on_release = pool.config.reset_on_release;
  }
}

void BlockStore::register_staged(std::size_t pool_index, std::span<SlotId> slots, std::span<const Token> tokens) {
  Pool& pool = *pools_[pool_index];
  check_tokens(slots.size(), tokens);
  const Lock lock(*this);
  std::size_t good = 0;
  const char* fault = nullptr;
  SlotId faulty = 0;
  tags_.resize(slots.size());
  for (; good < slots.size(); ++good) {
    faulty = slots[good];
    if (faulty >= pool.count) {
      fault = " is not in the pool";
      break;
    }
    Slot& slot = slots_[pool.first + faulty];
    if (slot.state != SlotState::Staged || slot.marked) {
      fault = slot.marked ? " is named twice" : " is not staged";
      break;
    }
    slot.marked = true;
    tags_[good] = BlockIndex::tag(slot.lineage);
    if (good < kAhead) pool.map.warm(tags_[good]);
  }
  for (std::size_t i = 0; i < good; ++i) slots_[pool.first + slots[i]].marked = false;
  if (fault != nullptr) {
    throw Error(faulty >= pool.count ? ErrorKind::UnknownBlock : ErrorKind::WrongState, "block ", faulty, fault);
  }
  if (tokens.empty()) {
    tokens = copied_tokens(slots.size(),
                           [&](std::size_t i) -> const LineageHash& { return slots_[pool.first + slots[i]].lineage; });
  }
  register_locked(pool, slots, tokens);
}

void BlockStore::commit(std::size_t pool_index, std::span<SlotId> slots, std::span<const BlockIdentity> identities,
                        std::span<const Token> tokens) {
  Pool& pool = *pools_[pool_index];
  check_tokens(slots.size(), tokens);
  const Lock lock(*this);
  if (tokens.empty() && slots.size() == identities.size()) {
    tokens = copied_tokens(slots.size(), [&](std::size_t i) -> const LineageHash& { return identities[i].lineage; });
  }
  stage_locked(pool, slots, identities);
  register_locked(pool, slots, tokens);
}

void BlockStore::register_locked(Pool& pool, std::span<SlotId> slots, std::span<const Token> tokens) {
  events_.begin_call();
  std::uint64_t fresh = 0;  // hashes that were not there: nearly all
  const bool quiet = is_quiet(pool);
  // Local copies stay in registers.
  Slot* const all = slots_.get();
  BlockIndex map = pool.map;
  const std::uint32_t* const tags = tags_.data();
  const SlotId first = pool.first;
  const std::size_t size = slots.size();
  const auto copy_of = [&](std::size_t i, SlotId id, SlotId head, const Token* block_tokens) {
    pool.map = map;
    slots[i] = register_copy(pool, id, head, block_tokens) - first;
    map = pool.map;
  };
  for (std::size_t i = 0; quiet && i < size; ++i) {
    if (i + kAhead < size) map.warm(tags[i + kAhead]);
    const SlotId id = first + slots[i];
    if (const SlotId head = map.find_or_insert(tags[i], id); head != kNoSlot) {
      copy_of(i, id, head, nullptr);
    } else {
      ++fresh;
      all[id].state = SlotState::Primary;
    }
  }
  for (std::size_t i = 0; !quiet && i < size; ++i) {
    if (i + kAhead < size) map.warm(tags[i + kAhead]);
    const Token* block_tokens = tokens.empty() ? nullptr : tokens.data() + i * block_size_;
    const SlotId id = first + slots[i];
    if (block_tokens != nullptr && emits_token_ids()) std::copy_n(block_tokens, block_size_, tokens_at(id));
    if (const SlotId head = map.find_or_insert(tags[i], id); head != kNoSlot) {
      copy_of(i, id, head, block_tokens);
    } else {
      ++fresh;
      note_registered(pool, id, block_tokens);
    }
  }
  pool.map = map;
  if (quiet) next_generation_ += fresh;
  pool.contested = pool.contested || pool.in(SlotState::Claimed) > 0;
  pool.moved(fresh, SlotState::Staged, SlotState::Primary);
  pool.references += fresh;
  pool.counters.registrations += slots.size();
  pool.policy->insert(freed_);
  freed_.clear();
}

// Registers a block whose hash `head` already holds; returns the slot that holds it now.
SlotId BlockStore::register_copy(Pool& pool, SlotId id, SlotId head, const Token* tokens) {
  Slot& slot = slots_[id];
  UNDERSTUDY_ASSERT(slot.state == SlotState::Staged, "registers a slot that is not staged");
  if (pool.config.duplicates == DuplicatePolicy::Reject) {
    make_reset(pool, id);
    freed_.push_back(id);
    ++pool.counters.registration_dedup;
    return acquire(pool, head);
  }
  const SlotId tail = slots_[head].twinned ? details_[head].twin_prev : head;
  details_[id].twin_prev = tail;
  details_[id].twin_next = head;
  details_[tail].twin_next = details_[head].twin_prev = id;
  slot.twinned = slots_[head].twinned = true;
  details_[id].generation = details_[head].generation;
  ++pool.references;
  if (pool.config.duplicates == DuplicatePolicy::Keep) {
    pool.move(slot, SlotState::Primary);
    if (events_on_) publish_stored(pool, id, false, tokens);
  } else if (slots_[head].state == SlotState::Primary) {
    pool.move(slot, SlotState::Duplicate);
    ++slots_[head].refs;  // keep-alive: a duplicate never outlives its primary
    ++pool.references;
    ++pool.counters.duplicate_blocks;
  } else {
    // Keeping the inactive copy alive too would take a slot that no request reserved; the new block replaces it.
    pool.policy->remove(head);
    forget(pool, head, false);
    make_reset(pool, head);
    freed_.push_back(head);
    pool.move(slot, SlotState::Primary);
  }
  return id;
}

bool BlockStore::present_elsewhere(const Pool& pool, const LineageHash& lineage) const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [&](const auto& other) { return other.get() != &pool && other->map.find(lineage) != kNoSlot; });
}

}  // namespace understudy
