#include "tiers/worker_tiers.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

WorkerTiers::WorkerTiers(const TierConfig& config, BlockStore& store, TierRun& run, const std::string& worker)
    : config_(config),
      store_(store),
      run_(run),
      device_(store),
      copies_(store.num_pools() > kG2 ? store.num_blocks(kG2) : 0) {
  if (config_.bytes_per_block < 1) throw Error(ErrorKind::ConfigError, "bytes_per_block must be at least 1");
  if (config_.bytes_per_block > LinkFlow::kMaxBytes) {
    throw Error(ErrorKind::ConfigError, "bytes_per_block must be at most 2^38, the most of one transfer, got ",
                config_.bytes_per_block);
  }
  if (config_.offload_batch_size < 1) throw Error(ErrorKind::ConfigError, "offload_batch_size must be at least 1");
  if (config_.offload_concurrency < 1) throw Error(ErrorKind::ConfigError, "offload_concurrency must be at least 1");
  if (!(config_.onboard_failure_rate >= 0 && config_.onboard_failure_rate <= 1)) {
    throw Error(ErrorKind::ConfigError, "onboard_failure_rate must be in [0, 1], got ", config_.onboard_failure_rate);
  }
  Links& links = run_.hub().links();
  host_ = add_link_pair(links, config_.host, worker + " g1_to_g2", worker + " g2_to_g1", config_.demand_first);
  for (const auto& tier : run_.shared()) {
    const bool disk = tier->tier() == Tier::G3;
    tier_links_.push_back(add_link_pair(links, tier->config().worker, worker + (disk ? " g2_to_g3" : " g2_to_g4"),
                                        worker + (disk ? " g3_to_g2" : " g4_to_g2"), config_.demand_first));
  }
  if (config_.min_reuse > 0 || config_.filter) reuse_ = HugeArray<std::uint32_t>(device_.num_blocks());
}

void WorkerTiers::use_device(DeviceBlocks& groups, std::size_t num_groups) {
  device_.use(groups);
  for (const auto& shared : run_.shared()) shared->use_groups(num_groups);
  if (reuse_.size() > 0) reuse_ = HugeArray<std::uint32_t>(device_.num_blocks());
}

std::vector<LinkId> WorkerTiers::links() const {
  std::vector<LinkId> out{host_.down, host_.up};
  for (const LinkPair& pair : tier_links_) out.insert(out.end(), {pair.down, pair.up});
  return out;
}

void WorkerTiers::set_link_share(std::int64_t now_ns, Tier tier, double share) {
  std::vector<LinkId> links;
  if (tier == Tier::G2) links = {host_.down, host_.up};
  for (std::size_t i = 0; i < run_.shared().size(); ++i) {
    if (run_.shared()[i]->tier() != tier) continue;
    const LinkPair& backend = run_.shared()[i]->backend();
    links = {tier_links_[i].down, tier_links_[i].up, backend.down, backend.up};
  }
  if (links.empty()) throw Error(ErrorKind::InvalidArgument, "there is no such tier below the device");
  const Links& all = hub().links();
  std::vector<DuplexId> caps;  // both links of a pair have the same one
  for (const LinkId link : links) {
    const std::optional<DuplexId> cap = all.duplex_of(link);
    if (cap && std::ranges::find(caps, *cap) == caps.end()) caps.push_back(*cap);
  }
  std::erase_if(links, [&](LinkId link) { return !all.has_limit(link); });
  if (links.empty() && caps.empty())
    throw Error(ErrorKind::InvalidArgument, "the links of that tier have no limit to be lowered");
  for (const LinkId link : links) hub().set_share(now_ns, link, share);
  for (const DuplexId cap : caps) hub().set_duplex_share(now_ns, cap, share);
}

void WorkerTiers::set_load_failures(Tier tier, double rate) {
  const auto is_it = [tier](const auto& shared) { return shared->tier() == tier; };
  if (tier != Tier::G2 && std::ranges::none_of(run_.shared(), is_it)) {
    throw Error(ErrorKind::InvalidArgument, "there is no such tier below the device");
  }
  failing_tier_ = tier;
  load_failure_rate_ = rate;
}

// ── Landings ──

void WorkerTiers::landed(const Purpose& purpose, std::int64_t time_ns) {
  ++landings_;
  try {
    land(purpose, time_ns);
  } catch (...) {  // a user-defined policy threw, after the landing
    changed(time_ns);
    throw;
  }
  changed(time_ns);
}

void WorkerTiers::land(const Purpose& purpose, std::int64_t time_ns) {
  switch (static_cast<Role>(purpose.role)) {
    case kCopy:
      copy_landed(purpose.index, time_ns);
      break;
    case kLower:
      lower_landed(purpose.tier, purpose.index, time_ns);
      break;
    case kStage:
      UNDERSTUDY_ASSERT(run_.shared()[purpose.tier]->loads_under_way() > 0, "a load landed that was not in flight");
      --run_.shared()[purpose.tier]->loads_under_way();
      next_phase(purpose.index, time_ns);
      break;
    case kLoad:
      UNDERSTUDY_ASSERT(loading_now_ > 0, "a load landed that was not in flight");
      --loading_now_;
      loads_[purpose.index].transfer.reset();
      if (fails(purpose.index)) loads_[purpose.index].failed = true;
      next_phase(purpose.index, time_ns);
      break;
  }
}

// ── Watch ──

bool WorkerTiers::idle() const noexcept {
  return copying_ == 0 && starting_.empty() && queued_.empty() && copying_lower_[0] + copying_lower_[1] == 0 &&
         loading_.size() == 0;
}

void WorkerTiers::check() const {
  std::uint64_t held = 0;
  std::uint64_t references = 0;
  std::uint64_t reserved = 0;
  std::size_t landing = 0;
  std::size_t loading = 0;
  for (const auto& copy : copies_.all()) {
    if (!copy->alive) continue;
    held += copy->evicted ? copy->from.size() : 0;
    references += copy->owner == kNoRequest ? copy->from.size() : 0;
    reserved += copy->from.size();
    landing += copy->to.size();
  }
  for (const Load& load : loads_) {
    if (!load.alive) continue;
    references += load.to.size() + load.pins.size();
    loading += load.blocks.size();
    if (load.phase == Phase::Loading) continue;
    reserved += static_cast<std::uint64_t>(std::ranges::count_if(load.tiers, [](Tier t) { return t > Tier::G2; }));
  }
  std::size_t parked = 0;
  for (const auto& [request, park] : parks_) {
    references += park.pins.size();
    parked += park.done ? 0 : 1;
  }
  const PoolMetrics g2 = store_.metrics(kG2);
  const std::uint64_t claimed = store_.in(kG2, SlotState::Claimed);
  if (held != held_ || references != g1_references_ || landing != claimed || landing != copies_.slots() ||
      loading != loading_.size() || reserved != g2.mutable_blocks + claimed || parked != parked_) {
    throw Error(ErrorKind::InvariantViolated, "tiers: held ", held, "/", held_, ", references ", references, "/",
                g1_references_, ", landing ", landing, "/", claimed, ", loading ", loading, "/", loading_.size(),
                ", reserved ", reserved, "/", g2.mutable_blocks + claimed, ", parked ", parked, "/", parked_);
  }
}

}  // namespace understudy
