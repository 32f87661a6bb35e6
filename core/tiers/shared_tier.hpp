// A tier that the run shares: every worker sees at time t what any worker stored up to t.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/exclusive_call.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"
#include "store/block_store.hpp"
#include "tiers/arrivals.hpp"
#include "tiers/tier_config.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

// The links to a tier and back.
struct LinkPair {
  LinkId down;
  LinkId up;
};
LinkPair add_link_pair(Links& links, const LinkPairConfig& config, const std::string& down, const std::string& up,
                       bool demand_first);

class SharedTier {
 public:
  // `slots` is the most blocks it will ever have. Links are named after `owner`, if any. With `check`, an index fed by
  // its events must agree with it after every change.
  SharedTier(Tier tier, const SharedTierConfig& config, std::uint64_t slots, std::uint32_t block_size, bool events,
             bool check, bool demand_first, Links& links, const std::string& owner);

  Tier tier() const noexcept { return tier_; }
  BlockStore& store() noexcept { return store_; }
  const BlockStore& store() const noexcept { return store_; }
  const SharedTierConfig& config() const noexcept { return config_; }
  const LinkPair& backend() const noexcept { return backend_; }
  std::uint32_t& loads_under_way() noexcept { return loads_under_way_; }

  // ── Copies to this tier ──
  // Prefetches what `expect` needs for the first of `blocks`.
  void warm(std::span<const BlockIdentity> blocks) const {
    constexpr std::size_t kFirst = 8;
    store_.warm(0, blocks.first(std::min(blocks.size(), kFirst)));
  }
  // Reserves slots for those of `blocks` that are neither here nor coming, in order, as far as there is room; `chosen`
  // are their indices. None: nothing to copy. The caller fills in the rest of the arrival.
  std::optional<Arrivals::Id> expect(std::span<const BlockIdentity> blocks, std::int64_t now_ns,
                                     std::vector<std::uint32_t>& chosen);
  Arrivals& arrivals() noexcept { return arrivals_; }
  const Arrivals& arrivals() const noexcept { return arrivals_; }
  // Makes the blocks visible. The caller removes the arrival.
  void land(Arrivals::Id id, std::int64_t time_ns);

  // ── Watch ──
  // Number of blocks over time; thinned when there are many samples.
  struct Residency {
    std::int64_t time_ns;
    std::uint64_t blocks;
  };
  const std::vector<Residency>& residency() const noexcept { return residency_; }
  // Publish blocks as those of so many KV groups.
  void use_groups(std::size_t num_groups) noexcept { num_groups_ = num_groups; }
  // Takes the events since the last call, with their times: the tier is a publisher of its own.
  void take_events(TimedEvents& out);
  // Throws InvariantViolated on inconsistent state. O(blocks) when `whole` or after that many changes, else O(1).
  void check(bool whole);

 private:
  static constexpr std::size_t kMaxSamples = 2048;

  void changed(std::int64_t now_ns);

  Tier tier_;
  SharedTierConfig config_;
  BlockStore store_;
  LinkPair backend_;
  std::uint32_t loads_under_way_ = 0;
  Arrivals arrivals_;
  std::vector<SlotId> here_;  // scratch, as are the next three
  std::vector<SlotId> to_;
  std::vector<BlockIdentity> wanted_;
  std::vector<std::uint32_t> tags_;

  bool emits_;
  bool checks_;
  std::size_t num_groups_ = 1;
  EngineEventLog events_;
  EventTruth truth_;
  std::uint64_t changes_ = 0;  // blocks stored or removed since the last whole check
  std::vector<Residency> residency_;
  std::int64_t sample_every_ns_ = 1'000'000;
};

// Shared by the tiers of a run: the clock of their transfers, and the tiers below the host.
class TierRun {
 public:
  // Uses `hub`, which must outlive it; null: its own.
  TierRun(const TierConfig& config, std::uint32_t block_size, bool events, bool check = false,
          TransferHub* hub = nullptr, const std::string& owner = "");
  TierRun(const TierRun&) = delete;
  TierRun& operator=(const TierRun&) = delete;

  TransferHub& hub() noexcept { return hub_; }
  const TransferHub& hub() const noexcept { return hub_; }
  // True if its tiers publish block identities, so that workers must pass them on.
  bool emits() const noexcept { return emits_; }
  std::vector<std::unique_ptr<SharedTier>>& shared() noexcept { return shared_; }
  const std::vector<std::unique_ptr<SharedTier>>& shared() const noexcept { return shared_; }
  // Shared by all workers: a call of one may land a block for another.
  CallFlag& call_flag() noexcept { return call_flag_; }
  // Throws InvariantViolated on inconsistent state. Without `whole` the cost depends on the changes since the last
  // call.
  void check(bool whole = false);

 private:
  CallFlag call_flag_;
  std::unique_ptr<TransferHub> own_hub_;
  TransferHub& hub_;
  bool emits_;
  std::uint64_t links_checked_at_ = 0;               // count of link operations at the last check
  std::vector<std::unique_ptr<SharedTier>> shared_;  // G3 before G4
};

}  // namespace understudy
