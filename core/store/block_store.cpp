// Construction. Allocation is in block_store_allocate.cpp, filling in block_store_fill.cpp and block_store_claim.cpp,
// lookups in block_store_find.cpp, references and release in block_store_hold.cpp, reports in block_store_watch.cpp.
#include "store/block_store.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "store/block_pool.hpp"

namespace understudy {

namespace {

constexpr std::size_t kSentinels = 6;  // per pool, before all slots; even, since two slots share a cache line

std::uint64_t total_blocks(const StoreConfig& config) {
  return std::accumulate(config.pools.begin(), config.pools.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const PoolConfig& pool) { return sum + pool.num_blocks; });
}

// Counts the leading slots up to the last pool that keeps details of a block, or several copies of one.
std::uint64_t slots_with_details(const StoreConfig& config) {
  std::uint64_t end = kSentinels * config.pools.size();
  std::uint64_t last = 0;
  for (const PoolConfig& pool : config.pools) {
    end += pool.num_blocks;
    if (pool.keeps_details || pool.duplicates != DuplicatePolicy::Reject) last = end;
  }
  return last;
}

// A user-defined policy may take slots in any order.
HugeArray<Slot>::Writes writes(const StoreConfig& config) {
  const bool advised =
      std::ranges::any_of(config.pools, [](const PoolConfig& pool) { return pool.policy.kind == PolicyKind::Advised; });
  return advised ? HugeArray<Slot>::Writes::Sparse : HugeArray<Slot>::Writes::Populated;
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
      slots_(num_slots_ + kSentinels * config.pools.size(), writes(config)),
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
  slots_.populate(0, first);
  for (const PoolConfig& pool_config : config.pools) {
    auto pool = std::make_unique<Pool>(pool_config, slots_.get(), first);
    PolicySpace space{slots_.get(), pool->first, pool->count, {}, sketch_.get()};
    for (std::size_t i = 0; i < space.sentinels.size(); ++i) space.sentinels[i] = sentinel + static_cast<SlotId>(i);
    sentinel += kSentinels;
    pool->policy = make_policy(pool_config.policy, space);
    if (pool_config.policy.kind == PolicyKind::Advised) pool->advised = static_cast<AdvisedOrder*>(pool->policy.get());
    pool->in_state[static_cast<std::size_t>(SlotState::Reset)] = pool->count;
    if (pool->advised != nullptr) pool->make_room(0, slots_);  // an advisor may select any slot
    // The first slots stay in small pages: with many workers most of a huge page would stay empty.
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

}  // namespace understudy
