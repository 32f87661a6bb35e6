#include "tiers/shared_tier.hpp"

#include <algorithm>
#include <cmath>

#include "base/assert.hpp"
#include "tiers/group_block.hpp"

namespace understudy {

namespace {

StoreConfig store_config(Tier tier, const SharedTierConfig& config, std::uint64_t slots, std::uint32_t block_size,
                         bool events) {
  StoreConfig store;
  store.block_size = block_size;
  PoolConfig pool;
  pool.tier = tier;
  pool.num_blocks = slots;
  pool.policy = config.policy;
  pool.duplicates = DuplicatePolicy::Reject;
  pool.keeps_details = events;
  store.pools = {pool};
  store.events.enabled = events;
  store.thread_safe = false;  // belongs to the run, which uses one thread
  return store;
}

std::string named(const std::string& owner, const char* link) { return owner.empty() ? link : owner + " " + link; }

}  // namespace

SharedTier::SharedTier(Tier tier, const SharedTierConfig& config, std::uint64_t slots, std::uint32_t block_size,
                       bool events, bool check, bool demand_first, Links& links, const std::string& owner)
    : tier_(tier),
      config_(config),
      store_(store_config(tier, config, slots, block_size, events || check)),
      backend_(add_link_pair(links, config.backend,
                             named(owner, tier == Tier::G3 ? "g2_to_g3_backend" : "g2_to_g4_backend"),
                             named(owner, tier == Tier::G3 ? "g3_to_g2_backend" : "g4_to_g2_backend"), demand_first)),
      arrivals_(slots),
      emits_(events),
      checks_(check) {}

LinkPair add_link_pair(Links& links, const LinkPairConfig& config, const std::string& down, const std::string& up,
                       bool demand_first) {
  std::optional<DuplexId> duplex;
  if (std::isfinite(config.duplex_gbps)) duplex = links.add_duplex(down, config.duplex_gbps, demand_first);
  return {links.add_link({down, config.down.bandwidth_gbps, config.down.fixed_ns, duplex, demand_first}),
          links.add_link({up, config.up.bandwidth_gbps, config.up.fixed_ns, duplex, demand_first})};
}

std::optional<Arrivals::Id> SharedTier::expect(std::span<const BlockIdentity> blocks, std::int64_t now_ns,
                                               std::vector<std::uint32_t>& chosen) {
  tags_.resize(blocks.size());
  store_.locate(0, blocks, tags_, false, chosen, here_);
  const std::size_t wanted = std::min<std::size_t>(chosen.size(), store_.available(0));
  chosen.resize(wanted);
  if (wanted == 0) return std::nullopt;
  if (wanted < blocks.size()) {  // mostly it lacks all of them
    wanted_.resize(wanted);
    for (std::size_t i = 0; i < wanted; ++i) {
      wanted_[i] = blocks[chosen[i]];
      tags_[i] = tags_[chosen[i]];  // reads ahead of its writes
    }
    tags_.resize(wanted);
    blocks = wanted_;
  }
  to_.resize(wanted);
  store_.reserve(0, blocks, tags_, to_);
  const Arrivals::Id id = arrivals_.expect(to_);
  UNDERSTUDY_ASSERT(store_.in(0, SlotState::Claimed) == arrivals_.slots(), "a claimed slot has no arrival");
  changed(now_ns);
  return id;
}

void SharedTier::land(Arrivals::Id id, std::int64_t time_ns) {
  Arrival& arrival = arrivals_.at(id);
  const bool awaited = !arrival.waiters.empty();
  store_.land(0, arrival.to, awaited);  // held until the waiters reference it
  if (awaited) {
    std::ranges::stable_sort(arrival.waiters, {}, &Arrival::Waiter::place);
    for (const Arrival::Waiter& waiter : arrival.waiters) {
      waiter.owner->source_landed(waiter.load, waiter.block, arrival.to[waiter.place], time_ns);
    }
    store_.release(0, arrival.to, true);
  }
  changed(time_ns);
}

void SharedTier::changed(std::int64_t now_ns) {
  if (residency_.empty() || now_ns >= residency_.back().time_ns + sample_every_ns_) {
    const PoolMetrics m = store_.metrics(0);
    residency_.push_back({now_ns, m.active_blocks + m.inactive_blocks});
    if (residency_.size() == kMaxSamples) {
      for (std::size_t i = 0; i < kMaxSamples / 2; ++i) residency_[i] = residency_[2 * i];
      residency_.resize(kMaxSamples / 2);
      sample_every_ns_ *= 2;
    }
  }
  changes_ += store_.num_events();
  if (!emits_ && !checks_) return;
  std::span<const EventRecord> published;
  store_.read_events([&](std::span<const EventRecord> rows) { published = events_.show(rows, now_ns, true); });
  if (checks_) {
    truth_.apply(published, now_ns);
    truth_.require_equal(store_, EventTruth::Scope::All);
  }
  if (!emits_) (void)events_.take_visible();
}

void SharedTier::take_events(TimedEvents& out) {
  events_.take_visible(out);
  if (num_groups_ > 1) split_groups(out.batch.records, num_groups_);
}

void SharedTier::check(bool whole) {
  const PoolMetrics m = store_.metrics(0);
  if (whole || changes_ > m.active_blocks + m.inactive_blocks + arrivals_.slots()) {
    changes_ = 0;
    store_.check();
    if (checks_) truth_.require_equal(store_, EventTruth::Scope::Whole);
  }
  if (const std::uint64_t claimed = store_.in(0, SlotState::Claimed); claimed != arrivals_.slots()) {
    throw Error(ErrorKind::InvariantViolated, "G", static_cast<int>(tier_), " has ", claimed, " reserved blocks, and ",
                arrivals_.slots(), " on their way");
  }
}

TierRun::TierRun(const TierConfig& config, std::uint32_t block_size, bool events, bool check, TransferHub* hub,
                 const std::string& owner)
    : own_hub_(hub == nullptr ? std::make_unique<TransferHub>() : nullptr),
      hub_(hub == nullptr ? *own_hub_ : *hub),
      emits_(events || check) {
  const auto add = [&](Tier tier, const SharedTierConfig& below) {
    shared_.push_back(std::make_unique<SharedTier>(tier, below, config.slots_for(below.num_blocks, below.policy),
                                                   block_size, events, check, config.demand_first, hub_.links(),
                                                   owner));
  };
  if (config.g3) add(Tier::G3, *config.g3);
  if (config.g4) add(Tier::G4, *config.g4);
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
