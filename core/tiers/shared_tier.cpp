#include "tiers/shared_tier.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace understudy {

namespace {

StoreConfig store_config(Tier tier, const SharedTierConfig& config, std::uint32_t block_size, bool events) {
  StoreConfig store;
  store.block_size = block_size;
  PoolConfig pool;
  pool.tier = tier;
  pool.num_blocks = config.num_blocks;
  pool.policy = config.policy;
  pool.duplicates = DuplicatePolicy::Reject;
  store.pools = {pool};
  store.events.enabled = events;
  store.thread_safe = false;  // belongs to the run, which is one thread
  return store;
}

}  // namespace

SharedTier::SharedTier(Tier tier, const SharedTierConfig& config, std::uint32_t block_size, bool events, bool check,
                       bool demand_first, Links& links)
    : tier_(tier),
      config_(config),
      store_(store_config(tier, config, block_size, events || check)),
      backend_(add_way(links, config.backend, tier == Tier::G3 ? "g2_to_g3_backend" : "g2_to_g4_backend",
                       tier == Tier::G3 ? "g3_to_g2_backend" : "g4_to_g2_backend", demand_first)),
      emits_(events),
      checks_(check) {}

Way add_way(Links& links, const WayConfig& config, const std::string& down, const std::string& up, bool demand_first) {
  std::optional<DuplexId> duplex;
  if (std::isfinite(config.duplex_gbps)) duplex = links.add_duplex(down, config.duplex_gbps, demand_first);
  return {links.add_link({down, config.down.bandwidth_gbps, config.down.fixed_ns, duplex, demand_first}),
          links.add_link({up, config.up.bandwidth_gbps, config.up.fixed_ns, duplex, demand_first})};
}

std::vector<SlotId> SharedTier::expect(std::vector<BlockIdentity>& blocks, std::int64_t now_ns, std::int64_t eta_ns) {
  std::vector<SlotId> seen(blocks.size());
  std::vector<std::uint32_t> references(blocks.size());
  store_.peek(0, blocks, seen.data(), references.data());
  std::size_t kept = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (seen[i] == kNoSlot && !coming(blocks[i].lineage)) blocks[kept++] = blocks[i];
  }
  blocks.resize(std::min<std::size_t>(kept, store_.available(0)));
  std::vector<SlotId> slots(blocks.size());
  store_.allocate(0, slots);
  for (const BlockIdentity& block : blocks) {
    if (unused_.empty()) {
      unused_.push_back(static_cast<std::uint32_t>(expected_.size()));
      expected_.emplace_back();
    }
    const std::uint32_t at = unused_.back();
    unused_.pop_back();
    expected_[at].eta_ns = eta_ns;
    expected_[at].transfer.reset();
    coming_.insert(block.lineage, at);
  }
  if (!slots.empty()) changed(now_ns);
  return slots;
}

void SharedTier::under_way(std::span<const BlockIdentity> blocks, TransferId id) {
  for (const BlockIdentity& block : blocks) expected_[coming_.find(block.lineage)].transfer = id;
}

void SharedTier::wait_for(const LineageHash& block, LandingWaiter& waiter, std::uint32_t load, std::uint32_t index) {
  expected_[coming_.find(block)].waiters.push_back({&waiter, load, index});
}

void SharedTier::land(std::span<SlotId> slots, std::span<const BlockIdentity> blocks, std::int64_t time_ns) {
  store_.commit(0, slots, blocks);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::uint32_t at = coming_.find(blocks[i].lineage);
    coming_.erase(blocks[i].lineage);
    const std::vector<Waiter> waiters = std::exchange(expected_[at].waiters, {});
    unused_.push_back(at);
    for (const Waiter& waiter : waiters) waiter.who->source_landed(waiter.load, waiter.index, slots[i], time_ns);
  }
  store_.release(0, slots, true);
  changed(time_ns);
}

void SharedTier::changed(std::int64_t now_ns) {
  const PoolMetrics m = store_.metrics(0);
  if (residency_.empty() || now_ns >= residency_.back().time_ns + sample_every_ns_) {
    residency_.push_back({now_ns, m.active_blocks + m.inactive_blocks});
    if (residency_.size() == kMaxSamples) {
      for (std::size_t i = 0; i < kMaxSamples / 2; ++i) residency_[i] = residency_[2 * i];
      residency_.resize(kMaxSamples / 2);
      sample_every_ns_ *= 2;
    }
  }
  changes_ += store_.num_events();
  if (!emits_ && !checks_) return;
  events_.add(store_.drain_events(~std::size_t{0}));
  const std::span<const EventRecord> told = events_.show(now_ns, true);
  if (checks_) {
    truth_.apply(told, now_ns);
    truth_.require_equal(store_, EventTruth::Scope::All);
  }
  if (on_events_ && !told.empty()) on_events_(now_ns);
  if (!emits_) (void)events_.take_visible();
}

void SharedTier::check(bool whole) {
  const PoolMetrics m = store_.metrics(0);
  if (whole || changes_ > m.active_blocks + m.inactive_blocks + m.mutable_blocks) {
    changes_ = 0;
    store_.check();
    if (checks_) truth_.require_equal(store_, EventTruth::Scope::Whole);
  }
  if (m.mutable_blocks != coming_.size()) {
    throw Error(ErrorKind::InvariantViolated, "G", static_cast<int>(tier_), " has ", m.mutable_blocks,
                " reserved blocks, and ", coming_.size(), " on their way");
  }
}

TierRun::TierRun(const TierConfig& config, std::uint32_t block_size, bool events, bool check, TransferHub* hub)
    : own_hub_(hub == nullptr ? std::make_unique<TransferHub>() : nullptr), hub_(hub == nullptr ? *own_hub_ : *hub) {
  if (config.g3)
    shared_.push_back(std::make_unique<SharedTier>(Tier::G3, *config.g3, block_size, events, check, config.demand_first,
                                                   hub_.links()));
  if (config.g4)
    shared_.push_back(std::make_unique<SharedTier>(Tier::G4, *config.g4, block_size, events, check, config.demand_first,
                                                   hub_.links()));
}

void TierRun::check(bool whole) {
  const Links& links = hub_.links();
  if (whole || links.operations() - links_checked_at_ > links.num_links()) {
    links_checked_at_ = links.operations();
    links.check();
  }
  for (const auto& tier : shared_) tier->check(whole);
}

}  // namespace understudy
