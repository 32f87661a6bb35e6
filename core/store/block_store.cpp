// Construction and allocation. Filling is in block_store_fill.cpp and block_store_claim.cpp, finding in
// block_store_find.cpp, holding and release in block_store_hold.cpp, reports in block_store_watch.cpp.
#include "store/block_store.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "store/block_pool.hpp"

namespace understudy {

namespace {

constexpr std::size_t kSentinels = 6;  // of each pool, in front of all slots; even, since two slots share a cache line
constexpr std::size_t kMaxPolicyTries = 10'000;  // answers of a policy that others have overtaken, in one allocation

std::uint64_t total_blocks(const StoreConfig& config) {
  return std::accumulate(config.pools.begin(), config.pools.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const PoolConfig& pool) { return sum + pool.num_blocks; });
}

// The leading slots up to the last pool that remembers more of a block than its hash, or has copies of one.
std::uint64_t slots_with_details(const StoreConfig& config) {
  std::uint64_t end = kSentinels * config.pools.size();
  std::uint64_t last = 0;
  for (const PoolConfig& pool : config.pools) {
    end += pool.num_blocks;
    if (pool.keeps_details || pool.duplicates != DuplicatePolicy::Reject) last = end;
  }
  return last;
}

const StoreConfig& checked(const StoreConfig& config) {
  if (config.block_size < 1 || config.block_size > BlockStore::kMaxBlockSize) {
    throw Error(ErrorKind::ConfigError, "block_size must be in 1..", BlockStore::kMaxBlockSize, ", got ",
                config.block_size);
  }
  if (config.pools.empty()) throw Error(ErrorKind::ConfigError, "pools must name at least one tier");
  std::array<bool, 5> seen{};
  for (const PoolConfig& pool : config.pools) {
    const auto tier = static_cast<std::size_t>(pool.tier);
    if (tier < 1 || tier > 4) throw Error(ErrorKind::ConfigError, "tier must be G1..G4, got ", tier);
    if (seen[tier]) throw Error(ErrorKind::ConfigError, "tier G", tier, " is given twice");
    seen[tier] = true;
    if (!pool.keeps_details && config.events.enabled && !config.events.names_only) {
      throw Error(ErrorKind::ConfigError, "keeps_details must be on for a tier that emits events");
    }
    if (pool.num_blocks < 1 || pool.num_blocks > BlockStore::kMaxBlocks) {
      throw Error(ErrorKind::ConfigError, "num_blocks must be in 1..", BlockStore::kMaxBlocks, ", got ",
                  pool.num_blocks);
    }
  }
  const std::uint64_t total = total_blocks(config);
  if (total > BlockStore::kMaxBlocks) {
    throw Error(ErrorKind::ConfigError, "num_blocks of all tiers together must be at most ", BlockStore::kMaxBlocks,
                ", got ", total);
  }
  return config;
}

}  // namespace

BlockStore::BlockStore(const StoreConfig& config)
    : block_size_(static_cast<std::uint32_t>(checked(config).block_size)),
      dp_rank_(config.dp_rank),
      events_on_(config.events.enabled),
      token_ids_(config.events.token_ids),
      thread_safe_(config.thread_safe),
      num_slots_(total_blocks(config)),
      slots_(num_slots_ + kSentinels * config.pools.size()),
      details_(slots_with_details(config)),
      tokens_(config.events.enabled && config.events.token_ids ? slots_.size() * config.block_size : 0),
      events_(config.events.capacity, config.events.token_ids ? config.block_size : 0) {
  std::uint64_t sketch_capacity = 0;
  for (const PoolConfig& pool : config.pools) {
    if (pool.policy.kind == PolicyKind::MultiLru) sketch_capacity += pool.num_blocks;
  }
  sketch_capacity = config.sketch_capacity.value_or(sketch_capacity);
  if (sketch_capacity != 0) sketch_ = std::make_unique<FrequencySketch>(sketch_capacity);

  SlotId sentinel = 0;
  auto first = static_cast<SlotId>(kSentinels * config.pools.size());
  for (const PoolConfig& pool_config : config.pools) {
    auto pool = std::make_unique<Pool>(pool_config, slots_.get(), first);
    PolicySpace space{slots_.get(), pool->first, pool->count, {}, sketch_.get()};
    for (std::size_t i = 0; i < space.sentinels.size(); ++i) space.sentinels[i] = sentinel + static_cast<SlotId>(i);
    sentinel += kSentinels;
    pool->policy = make_policy(pool_config.policy, space);
    if (pool_config.policy.kind == PolicyKind::Advised) pool->advised = static_cast<AdvisedOrder*>(pool->policy.get());
    pool->in_state[static_cast<std::size_t>(SlotState::Reset)] = pool->count;
    if (pool->advised != nullptr) pool->make_room(0, slots_);  // it may name any slot
    // The first slots of many workers stand in small pages, since most of a huge one might stay empty.
    constexpr std::size_t kSmall = HugeArray<Slot>::kHugePage / sizeof(Slot);
    slots_.prefer_huge_pages(first + kSmall, first + pool->count);
    first += pool->count;
    states_.push_back(&pool->in_state);
    pools_.push_back(std::move(pool));
  }
}

BlockStore::~BlockStore() = default;

std::size_t BlockStore::pool_of(Tier tier) const {
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    if (pools_[i]->config.tier == tier) return i;
  }
  throw Error(ErrorKind::ConfigError, "this store has no tier G", static_cast<int>(tier));
}

Tier BlockStore::tier(std::size_t pool) const noexcept { return pools_[pool]->config.tier; }
std::uint64_t BlockStore::num_blocks(std::size_t pool) const noexcept { return pools_[pool]->count; }
DuplicatePolicy BlockStore::duplicates(std::size_t pool) const noexcept { return pools_[pool]->config.duplicates; }
bool BlockStore::advised(std::size_t pool) const noexcept { return pools_[pool]->advised != nullptr; }
PolicyKind BlockStore::policy_kind(std::size_t pool) const noexcept { return pools_[pool]->config.policy.kind; }
const std::shared_ptr<PolicyAdvisor>& BlockStore::advisor(std::size_t pool) const noexcept {
  return pools_[pool]->config.policy.advisor;
}

void BlockStore::refuse_unknown(const Pool& pool, SlotId id) {
  throw Error(ErrorKind::UnknownBlock, "block ", id, " is not in 0..", pool.count - 1, " of tier G",
              static_cast<int>(pool.config.tier));
}

// ── Allocate ──

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

std::size_t BlockStore::allocate(std::size_t pool_index, std::span<SlotId> out, std::span<BlockIdentity> evicted,
                                 std::span<SlotId> evicted_slots) {
  Pool& pool = *pools_[pool_index];
  if (evicted.size() != out.size() || evicted_slots.size() != out.size()) {
    throw Error(ErrorKind::InvalidArgument, "there must be room for ", out.size(), " evicted blocks");
  }
  if (is_quiet(pool) && pool.advised == nullptr) {
    const Lock lock(*this);
    if (pool.available() < out.size()) refuse_shortage(pool, out.size(), pool.available());
    pool.make_room(out.size(), slots_);
    pool.policy->take(out);
    return hand_out_quietly<true>(pool, out, evicted.data() + evicted.size(), evicted_slots.data() + out.size());
  }
  std::vector<BlockIdentity> blocks;
  std::vector<SlotId> slots;
  std::uint64_t available = 0;
  if (!take(pool, out, {&blocks, &slots, nullptr}, &available)) refuse_shortage(pool, out.size(), available);
  std::ranges::reverse_copy(blocks, evicted.end() - static_cast<std::ptrdiff_t>(blocks.size()));
  std::ranges::reverse_copy(slots, evicted_slots.end() - static_cast<std::ptrdiff_t>(slots.size()));
  return blocks.size();
}

void BlockStore::refuse_shortage(const Pool& pool, std::size_t asked, std::uint64_t available) {
  throw Error(ErrorKind::CapacityExhausted, "asked for ", asked, " blocks of tier G",
              static_cast<int>(pool.config.tier), " but only ", available, " of ", pool.count, " are available");
}

// False, and how many there are, when there are too few.
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
    throw Error(ErrorKind::WrongState, "pool ", pool_index, " has not as many empty blocks as ", out.size(), " less ",
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

// The advisor is asked between two critical sections; if the pool moved meanwhile so that its answer no longer
// holds, it is told and asked again.
bool BlockStore::take_advised(Pool& pool, std::span<SlotId> out, const Evicted& evicted, std::uint64_t* available) {
  // Of any such pool: two that reach for each other's would wait for each other's turn.
  static thread_local bool asking = false;
  if (asking) {
    throw Error(ErrorKind::PolicyError,
                "an eviction policy must not allocate from its own pool, nor from another whose policy is Python's");
  }
  std::lock_guard<std::mutex> turn(pool.advisor_mutex);
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
    std::size_t learnt = 0;
    try {
      pool.config.policy.advisor->observe(local, learnt);
    } catch (...) {
      const Lock lock(*this);
      pool.advised->untold(std::span(news).subspan(learnt));
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

// `overtaken`: the only fault is that somebody else took a block in the meantime.
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

// `out` holds global ids that have just left the policy's order; it ends with local ones.
void BlockStore::hand_out(Pool& pool, std::span<SlotId> out, const Evicted& evicted) {
  if (is_quiet(pool) && !evicted.asked()) {
    (void)hand_out_quietly<false>(pool, out, nullptr, nullptr);
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
    out[i] = id - first;
    if (slot.state == SlotState::Inactive) {
      const bool last = !slot.twinned;
      if (last) {
        map.erase(tags[i], id);
        if (events_on_) tell_removed(pool, id, true);
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

// The same where there are no events, nor details. A slot is asked for, some blocks later the bucket that it is in, and
// some blocks later both are here. Where somebody is to be told what goes, the first of it comes last. Returns how many
// go.
template <bool kTold>
std::size_t BlockStore::hand_out_quietly(Pool& pool, std::span<SlotId> out, BlockIdentity* evicted_end,
                                         SlotId* slots_end) {
  constexpr std::size_t kBucketsAhead = kAhead / 2;
  Slot* const slots = slots_.get();
  BlockIndex map = pool.map;
  std::array<std::uint32_t, kBucketsAhead> tags{};
  const auto ask = [&](std::size_t i) {
    const Slot& slot = slots[out[i]];
    if (slot.state != SlotState::Inactive) return;
    tags[i % kBucketsAhead] = BlockIndex::tag(slot.lineage);
    map.warm(tags[i % kBucketsAhead]);
  };
  for (const SlotId id : out.first(std::min(kAhead, out.size()))) slots[id].warm();
  for (std::size_t i = 0; i < std::min(kBucketsAhead, out.size()); ++i) ask(i);
  const bool reset_on_release = pool.config.reset_on_release;
  const SlotId first = pool.first;
  std::uint64_t evictions = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint32_t tag = tags[i % kBucketsAhead];
    if (i + kAhead < out.size()) slots[out[i + kAhead]].warm();
    if (i + kBucketsAhead < out.size()) ask(i + kBucketsAhead);
    const SlotId id = out[i];
    Slot& slot = slots[id];
    out[i] = id - first;
    if (slot.state == SlotState::Inactive) {
      ++evictions;
      if constexpr (kTold) {
        *--evicted_end = {slot.lineage, 0, 0};
        *--slots_end = slot.twinned ? kNoSlot : id - first;
      }
      if (slot.twinned) {
        pool.map = map;
        leave_twins(pool, id, tag);
        map = pool.map;
      } else {
        map.erase(tag, id);
      }
    }
    slot.state = SlotState::Mutable;
    slot.refs = 1;
    slot.reset_on_release = reset_on_release;
  }
  pool.map = map;
  pool.handed_out(out.size(), evictions, SlotState::Mutable);
  return evictions;
}

}  // namespace understudy
