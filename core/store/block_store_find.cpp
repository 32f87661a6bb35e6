// Finds blocks: match, scan, peek, touch.
#include <algorithm>
#include <array>

#include "base/assert.hpp"
#include "store/block_pool.hpp"
#include "store/block_store.hpp"
#include "store/lookup.hpp"

namespace understudy {

namespace {

// Calls visit(i, tag, guess) with the slot that probably holds block i, until it returns false. Prefetches index lines
// a batch ahead. The index must not change meanwhile.
template <typename Warm, typename Visit>
void for_each_tag(const BlockIndex& index, std::span<const BlockIdentity> identities, Warm warm, Visit visit) {
  std::array<std::uint32_t, 2 * kTagBatch> tags;
  std::array<SlotId, kTagBatch> guesses;
  const auto prefetch = [&](std::size_t start) {
    for (std::size_t i = start; i < std::min(start + kTagBatch, identities.size()); ++i) {
      const std::uint32_t tag = BlockIndex::tag(identities[i].lineage);
      tags[i % tags.size()] = tag;
      index.warm(tag);
    }
  };
  prefetch(0);
  for (std::size_t start = 0; start < identities.size(); start += kTagBatch) {
    prefetch(start + kTagBatch);
    const std::size_t count = std::min(kTagBatch, identities.size() - start);
    const std::uint32_t* const own = &tags[start % tags.size()];
    for (std::size_t i = 0; i < count; ++i) guesses[i] = index.guess(own[i]);
    warm(std::span<const SlotId>(guesses.data(), count));
    for (std::size_t i = 0; i < count; ++i) {
      if (!visit(start + i, own[i], guesses[i])) return;
    }
  }
}

}  // namespace

void BlockStore::warm_slots(const Pool& pool, std::span<const SlotId> guesses) const {
  for (const SlotId id : guesses) {
    if (id < slots_.size()) slots_[id].warm();
  }
  pool.policy->warm(guesses);
}

SlotId BlockStore::acquire(Pool& pool, SlotId id) {
  Slot& slot = slots_[id];
  UNDERSTUDY_ASSERT(slot.registered() && (slot.refs == 0) == (slot.state == SlotState::Inactive),
                    "acquires a block whose references do not match its state");
  if (slot.state == SlotState::Inactive) {
    pool.policy->remove(id);
    pool.move(slot, SlotState::Primary);
  }
  ++slot.refs;
  ++pool.references;
  return id;
}

std::size_t BlockStore::match_prefix(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [&](std::span<const SlotId> guesses) { warm_slots(pool, guesses); };
  std::size_t hits = 0;
  for_each_tag(pool.map, identities, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = pool.map.find(identities[i].lineage, tag, guess);
    if (id == kNoSlot) return false;
    out[hits++] = acquire(pool, id) - pool.first;
    if (sketch_) sketch_->touch(identities[i].lineage);
    return true;
  });
  pool.counters.match_hashes_requested += identities.size();
  pool.counters.match_blocks_returned += hits;
  return hits;
}

std::size_t BlockStore::match_scattered(std::size_t pool_index, std::span<const BlockIdentity> identities,
                                        SlotId* out) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [&](std::span<const SlotId> guesses) { warm_slots(pool, guesses); };
  std::size_t hits = 0;
  for_each_tag(pool.map, identities, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = pool.map.find(identities[i].lineage, tag, guess);
    out[i] = id == kNoSlot ? kNoSlot : acquire(pool, id) - pool.first;
    if (id != kNoSlot) {
      ++hits;
      if (sketch_) sketch_->touch(identities[i].lineage);
    }
    return true;
  });
  pool.counters.match_hashes_requested += identities.size();
  pool.counters.match_blocks_returned += hits;
  return hits;
}

std::size_t BlockStore::scan(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                             bool touch) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [&](std::span<const SlotId> guesses) { warm_slots(pool, guesses); };
  std::size_t distinct = 0;
  for_each_tag(pool.map, identities, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = pool.map.find(identities[i].lineage, tag, guess);
    out[i] = kNoSlot;
    if (id == kNoSlot) return true;
    if (touch && sketch_) sketch_->touch(identities[i].lineage);
    if (!slots_[id].marked) {
      slots_[id].marked = true;
      out[i] = acquire(pool, id) - pool.first;
      ++distinct;
    }
    return true;
  });
  for (std::size_t i = 0; i < identities.size(); ++i) {
    if (out[i] != kNoSlot) slots_[pool.first + out[i]].marked = false;
  }
  pool.counters.scan_hashes_requested += identities.size();
  pool.counters.scan_blocks_returned += distinct;
  return distinct;
}

std::size_t BlockStore::prefix_length(std::size_t pool_index, std::span<const BlockIdentity> identities) const {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::size_t hits = 0;
  find_each(pool.map, identities, [&](std::size_t, SlotId id) {
    hits += id != kNoSlot ? 1 : 0;
    return id != kNoSlot;
  });
  return hits;
}

std::size_t BlockStore::peek_prefix(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                                    std::size_t* unreferenced) const {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::size_t hits = 0;
  *unreferenced = 0;
  const Slot* const slots = slots_.get() + pool.first;
  for (std::size_t i = 0; i < std::min(kAhead, identities.size()); ++i) warm_slot(pool, out[i]);
  for (; hits < identities.size() && out[hits] < pool.count; ++hits) {
    if (hits + kAhead < identities.size()) warm_slot(pool, out[hits + kAhead]);
    const Slot& slot = slots[out[hits]];
    if (slot.twinned || !slot.registered() || !(slot.lineage == identities[hits].lineage)) break;
    *unreferenced += slot.state == SlotState::Inactive ? 1 : 0;
  }
  // Most often that was the whole prefix.
  if (hits > 0 && hits < identities.size() && pool.map.find(identities[hits].lineage) == kNoSlot) return hits;
  find_each(pool.map, identities.subspan(hits), [&](std::size_t, SlotId id) {
    if (id == kNoSlot) return false;
    *unreferenced += slots_[id].state == SlotState::Inactive ? 1 : 0;
    out[hits++] = id - pool.first;
    return true;
  });
  return hits;
}

void BlockStore::peek(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                      std::uint32_t* references) const {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  find_each(pool.map, identities, [&](std::size_t i, SlotId id) {
    out[i] = id == kNoSlot ? kNoSlot : id - pool.first;
    references[i] = id == kNoSlot ? 0 : slots_[id].refs;
    return true;
  });
}

std::vector<Token> BlockStore::token_ids(std::size_t pool_index, std::span<const SlotId> slots) const {
  std::vector<Token> tokens;
  if (!emits_token_ids()) return tokens;
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  tokens.reserve(slots.size() * block_size_);
  for (const SlotId slot : slots) {
    const SlotId id = global(pool, slot);
    if (!slots_[id].registered()) throw Error(ErrorKind::WrongState, "block ", slot, " is not registered");
    tokens.insert(tokens.end(), tokens_at(id), tokens_at(id) + block_size_);
  }
  return tokens;
}

bool BlockStore::is_registered(std::size_t pool_index, SlotId slot) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  return slots_[global(pool, slot)].registered();
}

std::uint32_t BlockStore::references(std::size_t pool_index, SlotId slot) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  return slots_[global(pool, slot)].refs;
}

void BlockStore::has_blocks(std::size_t pool_index, std::span<const BlockIdentity> identities, bool* out) const {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  find_each(pool.map, identities, [&](std::size_t i, SlotId id) {
    out[i] = id != kNoSlot;
    return true;
  });
}

void BlockStore::touch(std::size_t pool_index, std::span<const BlockIdentity> identities) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::vector<SlotId> unreferenced;
  find_each(pool.map, identities, [&](std::size_t i, SlotId id) {
    if (id == kNoSlot) return true;
    if (sketch_) sketch_->touch(identities[i].lineage);
    if (slots_[id].state == SlotState::Inactive) unreferenced.push_back(id);
    return true;
  });
  pool.policy->touch(unreferenced);
}

void BlockStore::touch(std::size_t pool_index, std::span<const SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  for (const SlotId id : slots) {
    if (!slots_[global(pool, id)].registered()) throw Error(ErrorKind::WrongState, "block ", id, " is not registered");
  }
  for (const SlotId id : slots) {
    if (sketch_) sketch_->touch(slots_[pool.first + id].lineage);
    if (slots_[pool.first + id].state == SlotState::Inactive) freed_.push_back(pool.first + id);
  }
  pool.policy->touch(freed_);
  freed_.clear();
}

bool BlockStore::upgrade(std::size_t pool_index, std::span<SlotId> slots, std::span<const BlockIdentity> identities) {
  if (slots.size() != identities.size()) {
    throw Error(ErrorKind::InvalidArgument, "identities must name each of the ", slots.size(), " blocks, got ",
                identities.size());
  }
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::vector<SlotId> found(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const LineageHash& lineage = identities[i].lineage;
    const SlotId same = global(pool, slots[i]);
    const bool still = slots_[same].registered() && slots_[same].lineage == lineage;
    found[i] = still ? same : pool.map.find(lineage);
    if (found[i] == kNoSlot) return false;
  }
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = acquire(pool, found[i]) - pool.first;
  return true;
}

}  // namespace understudy
