#include "tiers/worker_tiers.hpp"

#include <algorithm>

namespace understudy {

WorkerTiers::WorkerTiers(const TierConfig& config, BlockStore& store, TierRun& run, const std::string& worker)
    : config_(config), store_(store), run_(run), copies_(store.num_pools() > kG2 ? store.num_blocks(kG2) : 0) {
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
  host_ = add_way(links, config_.host, worker + " g1_to_g2", worker + " g2_to_g1", config_.demand_first);
  for (const auto& tier : run_.shared()) {
    const bool disk = tier->tier() == Tier::G3;
    ways_.push_back(add_way(links, tier->config().worker, worker + (disk ? " g2_to_g3" : " g2_to_g4"),
                            worker + (disk ? " g3_to_g2" : " g4_to_g2"), config_.demand_first));
  }
  for (std::size_t pool = 0; pool < store_.num_pools(); ++pool) {
    counts_uses_ = counts_uses_ || store_.policy_kind(pool) == PolicyKind::MultiLru;
  }
  if (config_.min_reuse > 0 || config_.filter) reuse_ = HugeArray<std::uint32_t>(store_.num_blocks(kG1));
}

void WorkerTiers::set_link_share(std::int64_t now_ns, Tier tier, double share) {
  std::vector<LinkId> links;
  if (tier == Tier::G2) links = {host_.down, host_.up};
  for (std::size_t i = 0; i < run_.shared().size(); ++i) {
    if (run_.shared()[i]->tier() != tier) continue;
    const Way& backend = run_.shared()[i]->backend();
    links = {ways_[i].down, ways_[i].up, backend.down, backend.up};
  }
  if (links.empty()) throw Error(ErrorKind::InvalidArgument, "there is no such tier below the device");
  const Links& all = hub().links();
  std::vector<DuplexId> caps;  // both ways of a pair have the same one
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

// ── Landings ──

void WorkerTiers::landed(const Errand& errand, std::int64_t time_ns) {
  // What has gone further down was here before, and stays, unless it was to go. But where uses are counted, those of
  // blocks that steps have named come first.
  const bool seen = static_cast<Role>(errand.role) != kLower || on_change_ || config_.exclusive || counts_uses_;
  if (seen && watched_) before_landing_(time_ns, !counts_uses_ && leaves_device_as_it_is(errand));
  ++landings_;
  try {
    land(errand, time_ns);
  } catch (...) {  // a policy of the user's, after the landing
    changed(time_ns);
    throw;
  }
  changed(time_ns);
}

void WorkerTiers::land(const Errand& errand, std::int64_t time_ns) {
  switch (static_cast<Role>(errand.role)) {
    case kCopy:
      copy_landed(errand.index, time_ns);
      break;
    case kLower:
      lower_landed(errand.tier, errand.index, time_ns);
      break;
    case kStage:
      --run_.shared()[errand.tier]->loads_under_way();
      next_phase(errand.index, time_ns);
      break;
    case kLoad:
      --loading_now_;
      loads_[errand.index].transfer.reset();
      if (fails(errand.index)) loads_[errand.index].failed = true;
      next_phase(errand.index, time_ns);
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
    references += copy->owner == kNobody ? copy->from.size() : 0;
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
  for (const auto& [who, park] : parks_) {
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
