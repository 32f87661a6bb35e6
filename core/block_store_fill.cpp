// Filling blocks (stage, register) and finding them (match, scan, touch).
#include <algorithm>
#include <array>
#include <ranges>

#include "block_pool.hpp"
#include "block_store.hpp"

namespace understudy {

namespace {

constexpr std::size_t kTagBatch = 16;  // index lines asked for together

// Visits blocks as visit(i, tag, guess) with the slot that probably holds block i, until it returns false. The index
// lines of a few blocks are asked for while those before are visited. Nothing may change the index meanwhile.
template <typename Warm, typename Visit>
void for_each_tag(const BlockIndex& index, std::span<const BlockIdentity> identities, std::uint8_t pool, Warm warm,
                  Visit visit) {
  std::array<std::uint32_t, 2 * kTagBatch> tags;
  std::array<SlotId, kTagBatch> guesses;
  const auto ask = [&](std::size_t start) {
    for (std::size_t i = start; i < std::min(start + kTagBatch, identities.size()); ++i) {
      const std::uint32_t tag = BlockIndex::tag(identities[i].lineage, pool);
      tags[i % tags.size()] = tag;
      index.warm(tag);
    }
  };
  ask(0);
  for (std::size_t start = 0; start < identities.size(); start += kTagBatch) {
    ask(start + kTagBatch);
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

// ── Fill ──

void BlockStore::check_tokens(std::span<const SlotId> slots, std::span<const Token> tokens) const {
  if (!emits_token_ids() && tokens.empty()) return;
  const std::size_t expected = slots.size() * block_size_;
  if (tokens.size() != expected) {
    throw Error(ErrorKind::InvalidArgument, "token_ids must hold ", expected, " tokens for ", slots.size(),
                " blocks of ", block_size_, ", got ", tokens.size());
  }
}

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
  try {
    for (; done < slots.size(); ++done) {
      const SlotId id = global(pool, slots[done]);
      Slot& slot = slots_[id];
      if (slot.state != SlotState::Mutable) {
        throw Error(ErrorKind::WrongState, "block ", slots[done], " is not mutable (or is named twice)");
      }
      if (slot.refs != 1) throw Error(ErrorKind::WrongState, "block ", slots[done], " has other holders");
      slot.state = SlotState::Staged;
      set_identity(pool, id, identities[done]);
      tags_[done] = BlockIndex::tag(identities[done].lineage, pool.index);
      if (done < kAhead) index_->warm(tags_[done]);
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
  check_tokens(slots, tokens);
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
    tags_[good] = BlockIndex::tag(slot.lineage, pool.index);
    if (good < kAhead) index_->warm(tags_[good]);
  }
  for (std::size_t i = 0; i < good; ++i) slots_[pool.first + slots[i]].marked = false;
  if (fault != nullptr) {
    throw Error(faulty >= pool.count ? ErrorKind::UnknownBlock : ErrorKind::WrongState, "block ", faulty, fault);
  }
  register_locked(pool, slots, tokens);
}

void BlockStore::commit(std::size_t pool_index, std::span<SlotId> slots, std::span<const BlockIdentity> identities,
                        std::span<const Token> tokens) {
  Pool& pool = *pools_[pool_index];
  check_tokens(slots, tokens);
  const Lock lock(*this);
  stage_locked(pool, slots, identities);
  register_locked(pool, slots, tokens);
}

void BlockStore::register_locked(Pool& pool, std::span<SlotId> slots, std::span<const Token> tokens) {
  events_.begin_call();
  std::uint64_t fresh = 0;  // hashes that were not there: nearly all of them
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) index_->warm(tags_[i + kAhead]);
    const Token* block_tokens = tokens.empty() ? nullptr : tokens.data() + i * block_size_;
    const SlotId id = pool.first + slots[i];
    if (const SlotId head = index_->find_or_insert(tags_[i], id); head != kNoSlot) {
      slots[i] = register_copy(pool, id, head, block_tokens) - pool.first;
      continue;
    }
    ++fresh;
    note_registered(pool, id, block_tokens);
  }
  pool.contested = pool.contested || pool.in(SlotState::Claimed) > 0;
  pool.moved(fresh, SlotState::Staged, SlotState::Primary);
  pool.references += fresh;
  pool.counters.registrations += slots.size();
  pool.policy->insert(freed_);
  freed_.clear();
}

void BlockStore::claim(std::size_t pool_index, std::span<const SlotId> slots,
                       std::span<const BlockIdentity> identities) {
  if (emits_token_ids()) {
    throw Error(ErrorKind::WrongState, "blocks cannot be claimed where events carry token ids: a copy has none");
  }
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  stage_locked(pool, slots, identities);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size()) index_->warm(tags_[i + kAhead]);
    const LineageHash& lineage = identities[i].lineage;
    const bool there = index_->might_hold(tags_[i]) && (index_->find(lineage, pool.index, tags_[i]) != kNoSlot ||
                                                        index_->find_claim(lineage, pool.index, tags_[i]) != kNoSlot);
    if (there) {
      for (std::size_t j = 0; j < slots.size(); ++j) {
        if (j < i) index_->erase(tags_[j], pool.first + slots[j]);
        slots_[pool.first + slots[j]].state = SlotState::Mutable;
      }
      pool.moved(slots.size(), SlotState::Staged, SlotState::Mutable);
      pool.counters.stagings -= slots.size();
      throw Error(ErrorKind::WrongState, "block ", slots[i], " claims what is there already, or on its way");
    }
    slots_[pool.first + slots[i]].state = SlotState::Claimed;
    index_->insert(tags_[i], pool.first + slots[i]);
  }
  pool.moved(slots.size(), SlotState::Staged, SlotState::Claimed);
}

void BlockStore::land(std::size_t pool_index, std::span<SlotId> slots) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  std::size_t done = 0;
  try {
    for (; done < slots.size(); ++done) {
      Slot& slot = slots_[global(pool, slots[done])];
      if (slot.state != SlotState::Claimed) {
        throw Error(ErrorKind::WrongState, "block ", slots[done], " is not claimed (or is named twice)");
      }
      slot.state = SlotState::Staged;
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) slots_[pool.first + slots[i]].state = SlotState::Claimed;
    throw;
  }
  pool.moved(slots.size(), SlotState::Claimed, SlotState::Staged);
  events_.begin_call();
  pool.counters.registrations += slots.size();
  if (pool.contested || pool.config.reset_on_release) {
    land_contested(pool, slots);
    return;
  }
  for (const SlotId id : slots) note_registered(pool, pool.first + id, nullptr);
  for (const SlotId id : slots | std::views::reverse) {
    slots_[pool.first + id].state = SlotState::Inactive;
    slots_[pool.first + id].refs = 0;
    freed_.push_back(pool.first + id);
  }
  pool.moved(slots.size(), SlotState::Staged, SlotState::Inactive);
  pool.policy->insert(freed_);
  freed_.clear();
}

// Some of the blocks may have been registered by others since they were claimed.
void BlockStore::land_contested(Pool& pool, std::span<SlotId> slots) {
  std::uint64_t fresh = 0;
  for (SlotId& local : slots) {
    const SlotId id = pool.first + local;
    const SlotId head = index_->find(slots_[id].lineage, pool.index);
    if (head == kNoSlot) {
      ++fresh;
      note_registered(pool, id, nullptr);
    } else {
      index_->erase(BlockIndex::tag(slots_[id].lineage, pool.index), id);
      local = register_copy(pool, id, head, nullptr) - pool.first;
    }
  }
  pool.moved(fresh, SlotState::Staged, SlotState::Primary);
  pool.references += fresh;
  pool.contested = pool.contested && pool.in(SlotState::Claimed) > 0;
  pool.policy->insert(freed_);
  freed_.clear();
  release_locked(pool, slots, true);
}

// A block whose hash `head` already carries; returns the slot that now holds it.
SlotId BlockStore::register_copy(Pool& pool, SlotId id, SlotId head, const Token* tokens) {
  Slot& slot = slots_[id];
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
    if (events_on_) events_.stored(identity(id), details_[id].generation, pool.config.tier, false, tokens);
  } else if (slots_[head].state == SlotState::Primary) {
    pool.move(slot, SlotState::Duplicate);
    ++slots_[head].refs;  // keep-alive: a duplicate never outlives its primary
    ++pool.references;
    ++pool.counters.duplicate_blocks;
  } else {
    // Pinning the inactive twin too would take a slot that nobody reserved; it gives way to the newcomer instead.
    pool.policy->remove(head);
    forget(pool, head, false);
    make_reset(pool, head);
    freed_.push_back(head);
    pool.move(slot, SlotState::Primary);
  }
  return id;
}

bool BlockStore::present_elsewhere(const Pool& pool, const LineageHash& lineage) const {
  return std::any_of(pools_.begin(), pools_.end(), [&](const auto& other) {
    return other.get() != &pool && index_->find(lineage, other->index) != kNoSlot;
  });
}

// ── Find ──

void BlockStore::warm_slots(const Pool& pool, std::span<const SlotId> guesses) const {
  for (const SlotId id : guesses) {
    if (id < num_slots_) slots_[id].warm();
  }
  pool.policy->warm(guesses);
}

SlotId BlockStore::acquire(Pool& pool, SlotId id) {
  Slot& slot = slots_[id];
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
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
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
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
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
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
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
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  std::size_t hits = 0;
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const bool hit = index_->find(identities[i].lineage, pool.index, tag, guess) != kNoSlot;
    hits += hit ? 1 : 0;
    return hit;
  });
  return hits;
}

std::size_t BlockStore::peek_prefix(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                                    std::size_t* unreferenced) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  std::size_t hits = 0;
  *unreferenced = 0;
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
    if (id == kNoSlot) return false;
    *unreferenced += slots_[id].state == SlotState::Inactive ? 1 : 0;
    out[hits++] = id - pool.first;
    return true;
  });
  return hits;
}

void BlockStore::peek(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                      std::uint32_t* references) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
    out[i] = id == kNoSlot ? kNoSlot : id - pool.first;
    references[i] = id == kNoSlot ? 0 : slots_[id].refs;
    return true;
  });
}

void BlockStore::locate(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                        SlotId* claimed) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const LineageHash& lineage = identities[i].lineage;
    const SlotId id = index_->find(lineage, pool.index, tag, guess);
    const bool lost = id == kNoSlot && guess != BlockIndex::kAbsent;
    const SlotId claim = lost ? index_->find_claim(lineage, pool.index, tag) : kNoSlot;
    out[i] = id == kNoSlot ? kNoSlot : id - pool.first;
    claimed[i] = claim == kNoSlot ? kNoSlot : claim - pool.first;
    return true;
  });
}

bool BlockStore::is_registered(std::size_t pool_index, SlotId slot) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  return slots_[global(pool, slot)].registered();
}

void BlockStore::has_blocks(std::size_t pool_index, std::span<const BlockIdentity> identities, bool* out) const {
  const Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    out[i] = index_->find(identities[i].lineage, pool.index, tag, guess) != kNoSlot;
    return true;
  });
}

void BlockStore::touch(std::size_t pool_index, std::span<const BlockIdentity> identities) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  const auto warm = [](std::span<const SlotId>) {};
  std::vector<SlotId> unreferenced;
  for_each_tag(*index_, identities, pool.index, warm, [&](std::size_t i, std::uint32_t tag, SlotId guess) {
    const SlotId id = index_->find(identities[i].lineage, pool.index, tag, guess);
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
    found[i] = still ? same : index_->find(lineage, pool.index);
    if (found[i] == kNoSlot) return false;
  }
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = acquire(pool, found[i]) - pool.first;
  return true;
}

}  // namespace understudy
