// Hands out slots: from the policy's order, or from a user-defined policy.
#include <algorithm>
#include <array>
#include <string>

#include "base/assert.hpp"
#include "store/block_pool.hpp"
#include "store/block_store.hpp"

namespace understudy {

namespace {

constexpr std::size_t kMaxPolicyTries = 10'000;  // stale answers of a policy that one allocation accepts

}  // namespace

bool BlockStore::try_allocate(std::size_t pool_index, std::span<SlotId> out, std::vector<BlockIdentity>* evicted) {
  std::uint64_t available = 0;
  return take(*pools_[pool_index], out, {evicted, nullptr, nullptr}, &available);
}

void BlockStore::allocate(std::size_t pool_index, std::span<SlotId> out, std::vector<BlockIdentity>* evicted,
                          std::vector<Token>* evicted_tokens) {
  std::uint64_t available = 0;
  if (!emits_token_ids()) evicted_tokens = nullptr;
  if (!take(*pools_[pool_index], out, {evicted, nullptr, evicted_tokens}, &available)) {
    refuse_shortage(*pools_[pool_index], out.size(), available);
  }
}

std::size_t BlockStore::allocate(std::size_t pool_index, std::span<SlotId> out, const Leaving& leaving) {
  Pool& pool = *pools_[pool_index];
  const auto& [evicted, evicted_slots, tags, below] = leaving;
  if (evicted.size() != out.size() || evicted_slots.size() != out.size() || tags.size() != out.size() ||
      below >= pools_.size()) {
    throw Error(ErrorKind::InvalidArgument, "there must be room for ", out.size(), " evicted blocks, and a pool below");
  }
  if (is_quiet(pool) && pool.advised == nullptr) {
    const Lock lock(*this);
    if (pool.available() < out.size()) refuse_shortage(pool, out.size(), pool.available());
    pool.make_room(out.size(), slots_);
    pool.policy->take(out);
    return hand_out_quietly<true>(pool, out, leaving);
  }
  std::vector<BlockIdentity> blocks;
  std::vector<SlotId> slots;
  std::uint64_t available = 0;
  if (!take(pool, out, {&blocks, &slots, nullptr}, &available)) refuse_shortage(pool, out.size(), available);
  std::ranges::reverse_copy(blocks, evicted.end() - static_cast<std::ptrdiff_t>(blocks.size()));
  std::ranges::reverse_copy(slots, evicted_slots.end() - static_cast<std::ptrdiff_t>(slots.size()));
  for (std::size_t i = out.size() - blocks.size(); i < out.size(); ++i) tags[i] = BlockIndex::tag(evicted[i].lineage);
  return blocks.size();
}

void BlockStore::refuse_shortage(const Pool& pool, std::size_t asked, std::uint64_t available) {
  throw Error(ErrorKind::CapacityExhausted, "asked for ", asked, " blocks of tier G",
              static_cast<int>(pool.config.tier), " but only ", available, " of ", pool.count, " are available");
}

// Returns false, and the number available, when there are too few.
bool BlockStore::take(Pool& pool, std::span<SlotId> out, const Evicted& evicted, std::uint64_t* available) {
  if (pool.advised != nullptr) return take_advised(pool, out, evicted, available);
  const Lock lock(*this);
  *available = pool.available();
  if (*available < out.size()) return false;
  pool.make_room(out.size(), slots_);
  pool.policy->take(out);
  hand_out(pool, out, evicted);
  return true;
}

void BlockStore::allocate_evicting(std::size_t pool_index, std::span<SlotId> out, std::span<const SlotId> victims) {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  if (pool.advised != nullptr || victims.size() > out.size() ||
      out.size() - victims.size() > pool.in(SlotState::Reset)) {
    throw Error(ErrorKind::WrongState, "pool ", pool_index, " has fewer empty blocks than ", out.size(), " minus ",
                victims.size());
  }
  std::size_t fit = 0;
  for (; fit < victims.size(); ++fit) {
    Slot& slot = slots_[global(pool, victims[fit])];
    if (slot.state != SlotState::Inactive || slot.marked) break;
    slot.marked = true;
  }
  for (std::size_t i = 0; i < fit; ++i) slots_[pool.first + victims[i]].marked = false;
  if (fit < victims.size()) {
    throw Error(ErrorKind::WrongState, "block ", victims[fit], " is not cached and unreferenced, or is named twice");
  }
  const std::size_t empty = out.size() - victims.size();
  pool.make_room(empty, slots_);
  for (const SlotId id : victims) pool.policy->remove(pool.first + id);
  pool.policy->take(out.first(empty));
  for (std::size_t i = 0; i < victims.size(); ++i) out[empty + i] = pool.first + victims[i];
  hand_out(pool, out, {});
}

// Calls the advisor between two critical sections; repeats when the pool changed meanwhile and its answer is stale.
bool BlockStore::take_advised(Pool& pool, std::span<SlotId> out, const Evicted& evicted, std::uint64_t* available) {
  // For all pools of the thread: two advisors that allocate from each other's pools would deadlock.
  static thread_local bool asking = false;
  if (asking) {
    throw Error(ErrorKind::PolicyError,
                "an eviction policy must not allocate from its own pool, nor from another whose policy is Python's");
  }
  const std::lock_guard<std::mutex> advisor_lock(pool.advisor_mutex);
  struct Asking {
    Asking() { asking = true; }
    ~Asking() { asking = false; }
  } mark;

  for (std::size_t tries = 1;; ++tries) {
    std::vector<PolicyChange> news;
    {
      const Lock lock(*this);
      if (pool.available() < out.size()) {
        *available = pool.available();
        return false;
      }
      if (out.empty()) return true;
      news = pool.advised->pending();
    }
    std::vector<PolicyChange> local = news;
    for (PolicyChange& change : local) change.slot -= pool.first;
    std::size_t observed = 0;
    try {
      pool.config.policy.advisor->observe(local, observed);
    } catch (...) {
      const Lock lock(*this);
      pool.advised->restore(std::span(news).subspan(observed));
      throw;
    }
    const std::vector<SlotId> chosen = pool.config.policy.advisor->select(out.size());

    const Lock lock(*this);
    std::string why;
    bool overtaken = false;
    if (!validate_choice(pool, chosen, out.size(), &why, &overtaken)) {
      if (overtaken && pool.advised->has_pending() && tries < kMaxPolicyTries) continue;
      throw Error(ErrorKind::PolicyError, "the eviction policy was asked for ", out.size(), " blocks and ", why);
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = pool.first + chosen[i];
      pool.policy->remove(out[i]);
    }
    hand_out(pool, out, evicted);
    return true;
  }
}

// `overtaken`: the only fault is that another thread took a block meanwhile.
bool BlockStore::validate_choice(Pool& pool, const std::vector<SlotId>& chosen, std::size_t count, std::string* why,
                                 bool* overtaken) {
  if (chosen.size() != count) {
    *why = "named " + std::to_string(chosen.size());
    return false;
  }
  std::size_t good = 0;
  for (; good < count; ++good) {
    const SlotId id = chosen[good];
    if (id >= pool.count) {
      *why = "named block " + std::to_string(id) + ", which the pool does not have";
      break;
    }
    Slot& slot = slots_[pool.first + id];
    if (slot.marked || !slot.available()) {
      *why = "named block " + std::to_string(id) + (slot.marked ? " twice" : ", which is in use");
      *overtaken = !slot.marked;
      break;
    }
    slot.marked = true;
  }
  for (std::size_t i = 0; i < good; ++i) slots_[pool.first + chosen[i]].marked = false;
  return good == count;
}

// Marks slots that have just left the policy's order as Mutable; converts `out` from global to local ids.
void BlockStore::hand_out(Pool& pool, std::span<SlotId> out, const Evicted& evicted) {
  if (is_quiet(pool) && !evicted.asked()) {
    (void)hand_out_quietly<false>(pool, out, {});
    return;
  }
  events_.begin_call();
  Slot* const slots = slots_.get();
  BlockIndex map = pool.map;
  tags_.resize(out.size());
  std::uint32_t* const tags = tags_.data();
  const bool reset_on_release = pool.config.reset_on_release;
  const SlotId first = pool.first;
  bool evicts = false;
  for (const SlotId id : out.first(std::min(kAhead, out.size()))) slots[id].warm();
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i + kAhead < out.size()) slots[out[i + kAhead]].warm();
    if (slots[out[i]].state != SlotState::Inactive) continue;
    evicts = true;
    tags[i] = BlockIndex::tag(slots[out[i]].lineage);
    map.warm(tags[i]);
    if (pool.config.keeps_details) __builtin_prefetch(&details_[out[i]], 0, 3);
  }
  if (!evicts) {
    for (SlotId& id : out) {
      UNDERSTUDY_ASSERT(slots[id].state == SlotState::Reset || slots[id].state == SlotState::Mutable,
                        "hands out a slot that is in use");
      slots[id].state = SlotState::Mutable;
      slots[id].refs = 1;
      slots[id].reset_on_release = reset_on_release;
      id -= first;
    }
    pool.handed_out(out.size(), 0, SlotState::Mutable);
    return;
  }
  if (evicted.blocks != nullptr) {
    const std::size_t before = evicted.blocks->size();
    evicted.blocks->resize(before + out.size());
    BlockIdentity* next = evicted.blocks->data() + before;
    for (const SlotId id : out) {
      if (slots[id].state != SlotState::Inactive) continue;
      *next++ = pool.config.keeps_details ? identity(id) : BlockIdentity{slots[id].lineage, 0, 0};
    }
    evicted.blocks->resize(static_cast<std::size_t>(next - evicted.blocks->data()));
  }
  if (evicted.tokens != nullptr) {
    for (const SlotId id : out) {
      if (slots[id].state != SlotState::Inactive) continue;
      evicted.tokens->insert(evicted.tokens->end(), tokens_at(id), tokens_at(id) + block_size_);
    }
  }
  const std::size_t placed = evicted.slots != nullptr ? evicted.slots->size() : 0;
  if (evicted.slots != nullptr) evicted.slots->resize(placed + out.size());
  SlotId* const places = evicted.slots != nullptr ? evicted.slots->data() + placed : nullptr;

  std::uint64_t evictions = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const SlotId id = out[i];
    Slot& slot = slots[id];
    UNDERSTUDY_ASSERT(slot.available() || slot.state == SlotState::Mutable, "hands out a slot that is in use");
    out[i] = id - first;
    if (slot.state == SlotState::Inactive) {
      const bool last = !slot.twinned;
      if (last) {
        map.erase(tags[i], id);
        if (events_on_) publish_removed(pool, id, true);
      } else {
        pool.map = map;
        forget(pool, id, tags[i], true);
        map = pool.map;
      }
      if (places != nullptr) places[evictions] = last ? out[i] : kNoSlot;
      ++evictions;
    }
    slot.state = SlotState::Mutable;
    slot.refs = 1;
    slot.reset_on_release = reset_on_release;
  }
  pool.map = map;
  if (evicted.slots != nullptr) evicted.slots->resize(placed + evictions);
  pool.handed_out(out.size(), evictions, SlotState::Mutable);
}

// Same without events and details. Prefetches a slot, some blocks later its bucket, and again some later uses both.
// With kReport it lists evicted blocks, the first one last, and prefetches their buckets in the pool below. Returns the
// number of evicted blocks.
template <bool kReport>
std::size_t BlockStore::hand_out_quietly(Pool& pool, std::span<SlotId> out, const Leaving& leaving) {
  constexpr std::size_t kBucketsAhead = kAhead / 2;
  // Local copies stay in registers.
  Slot* const slots = slots_.get();
  const std::size_t size = out.size();
  const SlotId first = pool.first;
  const bool reset_on_release = pool.config.reset_on_release;
  const auto hand_out = [&](std::size_t i) {
    Slot& slot = slots[out[i]];
    UNDERSTUDY_ASSERT(slot.available() || slot.state == SlotState::Mutable, "hands out a slot that is in use");
    slot.state = SlotState::Mutable;
    slot.refs = 1;
    slot.reset_on_release = reset_on_release;
    out[i] -= first;
  };
  for (const SlotId id : out.first(std::min(kAhead, size))) slots[id].warm();
  // Empty slots come first; often there are no others.
  std::size_t empty = 0;
  for (; empty < size && slots[out[empty]].state != SlotState::Inactive; ++empty) {
    if (empty + kAhead < size) slots[out[empty + kAhead]].warm();
    hand_out(empty);
  }
  BlockIndex map = pool.map;
  const BlockIndex below = kReport ? pools_[leaving.below]->map : map;
  std::array<std::uint32_t, kBucketsAhead> tags{};
  const auto prefetch = [&](std::size_t i) {
    const Slot& slot = slots[out[i]];
    if (slot.state != SlotState::Inactive) return;
    const std::uint32_t tag = BlockIndex::tag(slot.lineage);
    tags[i % kBucketsAhead] = tag;
    map.warm(tag);
    if constexpr (kReport) below.warm(tag);
  };
  for (std::size_t i = empty; i < std::min(empty + kBucketsAhead, size); ++i) prefetch(i);
  std::size_t place = size;  // of the last evicted block in the report
  [[maybe_unused]] BlockIdentity* const blocks = leaving.blocks.data();
  [[maybe_unused]] SlotId* const block_slots = leaving.slots.data();
  [[maybe_unused]] std::uint32_t* const block_tags = leaving.tags.data();
  for (std::size_t i = empty; i < size; ++i) {
    const std::uint32_t tag = tags[i % kBucketsAhead];
    if (i + kAhead < size) slots[out[i + kAhead]].warm();
    if (i + kBucketsAhead < size) prefetch(i + kBucketsAhead);
    const SlotId id = out[i];
    const Slot& slot = slots[id];
    if (slot.state == SlotState::Inactive) {
      --place;
      if constexpr (kReport) {
        blocks[place] = {slot.lineage, 0, 0};
        block_slots[place] = slot.twinned ? kNoSlot : id - first;
        block_tags[place] = tag;
      }
      if (slot.twinned) {
        pool.map = map;
        leave_twins(pool, id, tag);
        map = pool.map;
      } else {
        map.erase(tag, id);
      }
    }
    hand_out(i);
  }
  pool.map = map;
  pool.handed_out(size, size - place, SlotState::Mutable);
  return size - place;
}

}  // namespace understudy
