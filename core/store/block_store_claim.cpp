// Fills blocks by a copy that takes time: claim and land.
#include <algorithm>
#include <array>

#include "base/assert.hpp"
#include "store/block_pool.hpp"
#include "store/block_store.hpp"

namespace understudy {

void BlockStore::claim(std::size_t pool_index, std::span<const SlotId> slots, std::span<const BlockIdentity> identities,
                       std::span<const Token> tokens) {
  if (slots.size() != identities.size()) {
    throw Error(ErrorKind::InvalidArgument, "identities must name each of the ", slots.size(), " blocks, got ",
                identities.size());
  }
  Pool& pool = *pools_[pool_index];
  check_tokens(slots.size(), tokens);
  const Lock lock(*this);
  if (tokens.empty()) {
    tokens = copied_tokens(slots.size(), [&](std::size_t i) -> const LineageHash& { return identities[i].lineage; });
  }
  BlockIndex map = pool.map;
  std::size_t done = 0;
  try {
    for (; done < slots.size(); ++done) {
      const SlotId id = global(pool, slots[done]);
      const LineageHash& lineage = identities[done].lineage;
      const std::uint32_t tag = BlockIndex::tag(lineage);
      if (slots_[id].state != SlotState::Mutable || slots_[id].refs != 1) {
        throw Error(ErrorKind::WrongState, "block ", slots[done],
                    " is not mutable, has other holders or is named twice");
      }
      if (map.holds_or_claims(lineage, tag)) {
        throw Error(ErrorKind::WrongState, "block ", slots[done],
                    " claims a hash that is there already, or on its way");
      }
      slots_[id].state = SlotState::Claimed;
      set_identity(pool, id, identities[done]);
      if (emits_token_ids()) std::copy_n(tokens.data() + done * block_size_, block_size_, tokens_at(id));
      map.insert(tag, id);
    }
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) {
      map.erase(BlockIndex::tag(identities[i].lineage), pool.first + slots[i]);
      slots_[pool.first + slots[i]].state = SlotState::Mutable;
    }
    pool.map = map;
    throw;
  }
  pool.map = map;
  pool.moved(slots.size(), SlotState::Mutable, SlotState::Claimed);
  pool.counters.stagings += slots.size();
}

bool BlockStore::reserves_in_one(const Pool& pool) const noexcept {
  return is_quiet(pool) && pool.advised == nullptr && pool.config.duplicates == DuplicatePolicy::Reject;
}

void BlockStore::reserve(std::size_t pool_index, std::span<const BlockIdentity> identities,
                         std::span<const std::uint32_t> tags, std::span<SlotId> out) {
  Pool& pool = *pools_[pool_index];
  if (!reserves_in_one(pool) || identities.size() != out.size() || tags.size() != out.size()) {
    return reserve(pool_index, identities, out);
  }
  const Lock lock(*this);
  if (pool.available() < out.size()) refuse_shortage(pool, out.size(), pool.available());
  pool.make_room(out.size(), slots_);
  pool.policy->take(out);
  replace_with_claims<true>(pool, out, identities, tags.data());
}

void BlockStore::reserve(std::size_t pool_index, std::span<const BlockIdentity> identities, std::span<SlotId> out) {
  Pool& pool = *pools_[pool_index];
  if (!reserves_in_one(pool) || identities.size() != out.size()) {
    allocate(pool_index, out);
    try {
      claim(pool_index, out, identities);
    } catch (...) {
      give_back(pool_index, out);
      throw;
    }
    return;
  }
  const Lock lock(*this);
  if (pool.available() < out.size()) refuse_shortage(pool, out.size(), pool.available());
  pool.make_room(out.size(), slots_);
  pool.policy->take(out);
  claims_.resize(out.size());
  for (std::size_t i = 0; i < out.size(); ++i) claims_[i] = BlockIndex::tag(identities[i].lineage);
  const std::size_t claimed = replace_with_claims<false>(pool, out, identities, claims_.data());
  if (claimed == out.size()) return;
  give_back_locked(pool, out);
  throw Error(ErrorKind::WrongState, "block ", out[claimed], " claims a hash that is there already, or on its way");
}

// Claims slots that have just left the policy's order; converts `out` from global to local ids. Returns the number
// claimed: all, or else none of them is claimed and the result is the first that cannot be. `claims` are the tags of
// `identities`; kSure: none of them can fail.
template <bool kSure>
std::size_t BlockStore::replace_with_claims(Pool& pool, std::span<SlotId> out,
                                            std::span<const BlockIdentity> identities, const std::uint32_t* claims) {
  Slot* const slots = slots_.get();
  BlockIndex map = pool.map;
  constexpr std::size_t kBucketsAhead = kAhead / 2;
  std::array<std::uint32_t, kBucketsAhead> tags{};
  const auto prefetch = [&](std::size_t i) {
    const Slot& slot = slots[out[i]];
    if (slot.state != SlotState::Inactive) return;
    tags[i % kBucketsAhead] = BlockIndex::tag(slot.lineage);
    map.warm(tags[i % kBucketsAhead]);
  };
  for (const SlotId id : out.first(std::min(kAhead, out.size()))) slots[id].warm();
  for (std::size_t i = 0; i < std::min(kBucketsAhead, out.size()); ++i) prefetch(i);
  const bool reset_on_release = pool.config.reset_on_release;
  const SlotId first = pool.first;
  std::uint64_t evictions = 0;
  std::size_t claimed = out.size();
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint32_t tag = tags[i % kBucketsAhead];
    if (i + kAhead < out.size()) slots[out[i + kAhead]].warm();
    if (i + kBucketsAhead < out.size()) prefetch(i + kBucketsAhead);
    const SlotId id = out[i];
    UNDERSTUDY_ASSERT(slots[id].available() || slots[id].state == SlotState::Mutable, "claims a slot that is in use");
    Slot& slot = slots[id];
    out[i] = id - first;
    if (slot.state == SlotState::Inactive) {
      map.erase(tag, id);
      ++evictions;
    }
    slot.refs = 1;
    slot.reset_on_release = reset_on_release;
    const LineageHash& lineage = identities[i].lineage;
    if constexpr (!kSure) {
      slot.state = SlotState::Mutable;
      if (i > claimed) continue;
      if (map.holds_or_claims(lineage, claims[i])) {
        claimed = i;
        continue;
      }
    }
    slot.lineage = lineage;
    slot.state = SlotState::Claimed;
    map.insert(claims[i], id);
  }
  if (claimed < out.size()) {
    for (std::size_t i = 0; i < claimed; ++i) {
      map.erase(claims[i], first + out[i]);
      slots[first + out[i]].state = SlotState::Mutable;
    }
  }
  pool.map = map;
  const SlotState now = claimed < out.size() ? SlotState::Mutable : SlotState::Claimed;
  pool.handed_out(out.size(), evictions, now);
  if (claimed == out.size()) pool.counters.stagings += out.size();
  return claimed;
}

void BlockStore::land(std::size_t pool_index, std::span<SlotId> slots, bool held) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  // Blocks need no registration one by one if only their slots matter and none was registered meanwhile.
  const bool at_once = !pool.contested && is_quiet(pool) && (held || !pool.config.reset_on_release);
  const SlotState landed = !at_once ? SlotState::Staged : held ? SlotState::Primary : SlotState::Inactive;
  freed_.resize(slots.size());
  std::size_t next = slots.size();
  for (const SlotId id : slots.last(std::min(kAhead, slots.size()))) warm_slot(pool, id);
  // Local copies stay in registers.
  Slot* const all = slots_.get();
  SlotId* freed = freed_.data();
  const SlotId first = pool.first;
  const std::uint32_t count = pool.count;
  const std::uint32_t refs = at_once && !held ? 0 : 1;
  try {
    for (; next > 0; --next) {
      if (next > kAhead && slots[next - 1 - kAhead] < count) all[first + slots[next - 1 - kAhead]].warm();
      if (slots[next - 1] >= count) refuse_unknown(pool, slots[next - 1]);
      const SlotId id = first + slots[next - 1];
      Slot& slot = all[id];
      if (slot.state != SlotState::Claimed) {
        throw Error(ErrorKind::WrongState, "block ", slots[next - 1], " is not claimed (or is named twice)");
      }
      slot.state = landed;
      slot.refs = refs;
      *freed++ = id;
    }
  } catch (...) {
    freed_.clear();
    for (; next < slots.size(); ++next) {
      slots_[pool.first + slots[next]].state = SlotState::Claimed;
      slots_[pool.first + slots[next]].refs = 1;
    }
    throw;
  }
  pool.moved(slots.size(), SlotState::Claimed, landed);
  pool.counters.registrations += slots.size();
  if (at_once) {
    next_generation_ += slots.size();
    if (held) {
      pool.references += slots.size();
    } else {
      pool.policy->insert(freed_);
    }
    freed_.clear();
    return;
  }
  freed_.clear();
  events_.begin_call();
  land_held(pool, slots);
  if (!held) release_locked(pool, slots, true);
}

// Registers landed blocks one by one: others may have registered some of them since they were claimed.
void BlockStore::land_held(Pool& pool, std::span<SlotId> slots) {
  std::uint64_t fresh = 0;
  for (SlotId& local : slots) {
    const SlotId id = pool.first + local;
    const SlotId head = pool.map.find(slots_[id].lineage);
    const Token* const tokens = emits_token_ids() ? tokens_at(id) : nullptr;
    if (head == kNoSlot) {
      ++fresh;
      note_registered(pool, id, tokens);
    } else {
      pool.map.erase(BlockIndex::tag(slots_[id].lineage), id);
      local = register_copy(pool, id, head, tokens) - pool.first;
    }
  }
  pool.moved(fresh, SlotState::Staged, SlotState::Primary);
  pool.references += fresh;
  pool.contested = pool.contested && pool.in(SlotState::Claimed) > 0;
  pool.policy->insert(freed_);
  freed_.clear();
}

}  // namespace understudy
