// A tier that belongs to the run: every worker sees at t what any of them stored at t' <= t, and nothing earlier.
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

// The two directions to a tier.
struct Way {
  LinkId down;
  LinkId up;
};
Way add_way(Links& links, const WayConfig& config, const std::string& down, const std::string& up, bool demand_first);

class SharedTier {
 public:
  // With `slots` for as many blocks as it will ever have. Its links bear the name of its `owner`, if there is one. With
  // `check`, an index fed by its events alone must agree with it after every change.
  SharedTier(Tier tier, const SharedTierConfig& config, std::uint64_t slots, std::uint32_t block_size, bool events,
             bool check, bool demand_first, Links& links, const std::string& owner);

  Tier tier() const noexcept { return tier_; }
  BlockStore& store() noexcept { return store_; }
  const BlockStore& store() const noexcept { return store_; }
  const SharedTierConfig& config() const noexcept { return config_; }
  const Way& backend() const noexcept { return backend_; }
  std::uint32_t& loads_under_way() noexcept { return loads_under_way_; }

  // ── Copies on their way here ──
  // Asks for what `expect` will need for the first of `blocks`, a little ahead.
  void warm(std::span<const BlockIdentity> blocks) const {
    constexpr std::size_t kFirst = 8;
    store_.warm(0, blocks.first(std::min(blocks.size(), kFirst)));
  }
  // Reserves room for those of `blocks` that are neither here nor coming, in order, as far as there is room: `chosen`
  // are their places. Nothing when there are none. Of the arrival the rest is the caller's.
  std::optional<Arrivals::Id> expect(std::span<const BlockIdentity> blocks, std::int64_t now_ns,
                                     std::vector<std::uint32_t>& chosen);
  Arrivals& arrivals() noexcept { return arrivals_; }
  const Arrivals& arrivals() const noexcept { return arrivals_; }
  // They are here: visible from now on. The caller forgets the arrival.
  void land(Arrivals::Id id, std::int64_t time_ns);

  // ── Watch ──
  // Blocks that it has, over time; thinned when there are many.
  struct Residency {
    std::int64_t time_ns;
    std::uint64_t blocks;
  };
  const std::vector<Residency>& residency() const noexcept { return residency_; }
  // Its events since the last call, each with its time: it is a publisher of its own.
  void take_events(TimedEvents& out) { events_.take_visible(out); }
  // InvariantViolated when something is wrong. O(blocks) when `whole`, or when so many have come or gone since it last
  // was; else O(1).
  void check(bool whole);

 private:
  static constexpr std::size_t kMaxSamples = 2048;

  void changed(std::int64_t now_ns);

  Tier tier_;
  SharedTierConfig config_;
  BlockStore store_;
  Way backend_;
  std::uint32_t loads_under_way_ = 0;
  Arrivals arrivals_;
  std::vector<SlotId> here_;  // scratch, and so are the next three
  std::vector<SlotId> to_;
  std::vector<BlockIdentity> wanted_;
  std::vector<std::uint32_t> tags_;

  bool emits_;
  bool checks_;
  EngineEventLog events_;
  EventTruth truth_;
  std::uint64_t changes_ = 0;  // blocks that came or went since all were checked
  std::vector<Residency> residency_;
  std::int64_t sample_every_ns_ = 1'000'000;
};

// What the tiers of a run share: the clock of their transfers, and the tiers below the host.
class TierRun {
 public:
  // On `hub`, which outlives it; null: on one of its own.
  TierRun(const TierConfig& config, std::uint32_t block_size, bool events, bool check = false,
          TransferHub* hub = nullptr, const std::string& owner = "");
  TierRun(const TierRun&) = delete;
  TierRun& operator=(const TierRun&) = delete;

  TransferHub& hub() noexcept { return hub_; }
  const TransferHub& hub() const noexcept { return hub_; }
  // Whether its tiers tell who a block is, and so have to be told.
  bool emits() const noexcept { return emits_; }
  std::vector<std::unique_ptr<SharedTier>>& shared() noexcept { return shared_; }
  const std::vector<std::unique_ptr<SharedTier>>& shared() const noexcept { return shared_; }
  // Of everybody who shares it: what one worker does may make a block of another's land.
  CallFlag& call_flag() noexcept { return call_flag_; }
  // InvariantViolated when something is wrong. Without `whole` its cost goes by what has changed since the last call.
  void check(bool whole = false);

 private:
  CallFlag call_flag_;
  std::unique_ptr<TransferHub> own_hub_;
  TransferHub& hub_;
  bool emits_;
  std::uint64_t links_checked_at_ = 0;               // their operations until then
  std::vector<std::unique_ptr<SharedTier>> shared_;  // G3 before G4
};

}  // namespace understudy
