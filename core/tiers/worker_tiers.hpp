// One worker's transfers to the host and the tiers below, and back.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/huge_array.hpp"
#include "base/request_id.hpp"
#include "store/block_store.hpp"
#include "tiers/device_blocks.hpp"
#include "tiers/in_flight.hpp"
#include "tiers/shared_tier.hpp"
#include "tiers/tier_config.hpp"
#include "tiers/tier_totals.hpp"
#include "tiers/transfer_estimate.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

// Pool 0 of the store is the device, unless `use_device` says otherwise, and pool 1 the host. Never reads a clock. The
// engine asks for slots and loads; poll the results with `waiting` and `take_ready`.
class WorkerTiers final : public TransferOwner, public LandingWaiter {
 public:
  static constexpr RequestSlot kNoRequest = 0xFFFFFFFFu;
  static constexpr std::size_t kG1 = 0;
  static constexpr std::size_t kG2 = 1;

  WorkerTiers(const TierConfig& config, BlockStore& store, TierRun& run, const std::string& worker);

  // Moves to a device whose blocks, of so many KV groups, are not in the store, before any was used.
  void use_device(DeviceBlocks& groups, std::size_t num_groups);

  const TierConfig& config() const noexcept { return config_; }
  // True if a user-defined policy is called at the end of steps, where it may throw.
  bool calls_user_code_after_steps() const noexcept {
    return config_.mode == OffloadMode::WriteThrough && (config_.filter || store_.advised(kG2));
  }
  TransferHub& hub() noexcept { return run_.hub(); }
  const TransferHub& hub() const noexcept { return run_.hub(); }
  CallFlag& call_flag() noexcept { return run_.call_flag(); }
  const LinkPair& host_links() const noexcept { return host_; }
  std::vector<LinkId> links() const;  // of this worker
  // Scales the bandwidth of the links to and from a tier, including those of a shared tier, from now on; unlimited
  // links are unaffected. Throws InvalidArgument when there is no such tier or no limit.
  void set_link_share(std::int64_t now_ns, Tier tier, double share);
  // Loads with a block of this tier fail with this probability when they end, by the tiers' seed. InvalidArgument when
  // there is no such tier below the device.
  void set_load_failures(Tier tier, double rate);

  // Called after every landing that may have changed a block of this worker, with its time.
  void set_on_change(std::function<void(std::int64_t)> on_change) { on_change_ = std::move(on_change); }

  // ── Room on the device ──
  enum class Room : std::uint8_t {
    Taken,
    Short,  // no room, now or later
    Wait,   // slots are held until their copies have left; poll `waiting`
  };
  // Fills all of `out` or nothing. Evicts; blocks that qualify for the host are copied first.
  Room take(RequestSlot request, std::int64_t now_ns, std::span<SlotId> out);
  bool waiting(RequestSlot request) const noexcept { return request < waits_.size() && waits_[request].remaining > 0; }
  void stop_waiting(RequestSlot request, std::int64_t now_ns);
  std::int64_t waited_ns(RequestSlot request) const noexcept {
    return request < waits_.size() ? waits_[request].total_ns : 0;
  }
  // Same, for a request that has ended; resets it, because its slot is reused.
  std::int64_t take_waited_ns(RequestSlot request) noexcept {
    return request < waits_.size() ? std::exchange(waits_[request].total_ns, 0) : 0;
  }
  // Number of device slots that copies and loads have freed so far.
  std::uint64_t released() const noexcept { return released_; }
  void note_hits(std::span<const SlotId> slots);

  // ── Copies down ──
  // Copies blocks that a request has just computed or hit to the host, if missing there (write-through only). The
  // copies rely on the request's references until hold_copied.
  void write_through(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> slots,
                     std::span<const BlockIdentity> blocks);
  // The same in any mode.
  void copy_down(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> slots,
                 std::span<const BlockIdentity> blocks);
  // Gives copies of the request's blocks their own references; call before the request drops or counts references.
  void hold_copied(RequestSlot request) {
    if (request < copies_of_.size() && copies_of_[request] != kNoCopy) hold_copies_of(request);
  }

  // ── Loads up ──
  enum class Onboard : std::uint8_t {
    Miss,    // nothing to load, or no room for it
    Slow,    // computing is sooner
    Parked,  // loading: `take_ready` will return the request
    Retry,   // no slots now: ask again after `waiting`
  };
  // Loads blocks for a request. `prefix`: leading hits on the device; `blocks`: those that follow. `saved_ns(n)`:
  // computing time saved by the first n of them.
  Onboard onboard(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix,
                  std::span<const BlockIdentity> blocks, const std::function<std::int64_t(std::size_t)>& saved_ns);
  // Whether a load in flight brings the block, or a tier from the host down to `lowest` has it or will have it.
  bool has_below(const BlockIdentity& block, Tier lowest) const;
  // A hit that needs all of `blocks`, in order of position: those of several KV groups.
  struct WholeHit {
    struct Units {
      std::size_t first = 0;
      std::size_t end = 0;
    };
    std::span<const BlockIdentity> blocks;
    std::span<const Units> covers;  // units of hashing in each block
    std::size_t first_unit = 0;     // units before it were found on the device
    std::size_t end_unit = 0;
  };
  // Loads the blocks that the device lacks, all or none. `saved_ns`: computing time saved by the hit. A unit's origin
  // is the lowest tier that one of its blocks comes from.
  Onboard onboard_all(RequestSlot request, std::int64_t now_ns, const WholeHit& hit, std::int64_t saved_ns);
  // Lowest tier that there is.
  Tier lowest() const noexcept { return run_.shared().empty() ? Tier::G2 : run_.shared().back()->tier(); }
  // Counts a request that was admitted without a slow load.
  void note_slow() noexcept { ++totals_.slow_loads; }
  // Loads blocks for later use, if there is room without a copy. Returns true when something is on its way; else
  // nothing has changed.
  bool prefetch(std::int64_t now_ns, std::span<const BlockIdentity> blocks);
  // Takes the requests whose loads have ended or failed, in that order.
  std::vector<RequestSlot> take_ready() { return std::exchange(ready_, {}); }
  bool has_ready() const noexcept { return !ready_.empty(); }
  std::size_t parked() const noexcept { return parked_ + ready_.size(); }  // including those not taken yet
  // Removes a request that has ended or was never parked; transfers in flight continue to their ends.
  void abandon(RequestSlot request);
  // Source tiers of the blocks after the prefix in the request's last load; taken once.
  struct Origin {
    std::size_t first_block = 0;
    std::vector<Tier> tiers{};
    std::int64_t parked_ns = 0;
    bool failed = false;
  };
  std::optional<Origin> take_origin(RequestSlot request);
  // Answers for the leading blocks, up to and including the first miss.
  std::vector<TierAnswer> lookup(std::span<const BlockIdentity> blocks);

  // ── Watch ──
  std::uint64_t held() const noexcept { return held_; }
  std::uint64_t g1_references() const noexcept { return g1_references_; }  // ours, held and reserved slots included
  bool idle() const noexcept;
  // Total landings: of its transfers, and of blocks from any worker that its loads waited for.
  std::uint64_t landings() const noexcept { return landings_; }
  std::uint64_t loads_ended() const noexcept { return loads_ended_; }  // or failed, in total
  const TierTotals& totals() const noexcept { return totals_; }
  // Durations of ended loads, failed ones included, if keep_load_times was called.
  void keep_load_times() noexcept { keeps_load_times_ = true; }
  const std::vector<std::int64_t>& onboard_ns() const noexcept { return onboard_ns_; }
  void check() const;

  // ── Called by transfers ──
  void landed(const Purpose& purpose, std::int64_t time_ns) override;
  void source_landed(std::uint32_t load, std::uint32_t block, SlotId slot, std::int64_t time_ns) override;

 private:
  struct Wait {
    std::uint32_t remaining = 0;
    std::uint32_t epoch = 0;  // increases when the request stops waiting, which voids older copies
    std::int64_t since_ns = 0;
    std::int64_t total_ns = 0;
  };
  struct RoomWaiter {
    RequestSlot request;
    std::uint32_t epoch;
  };
  static constexpr std::uint32_t kNoCopy = 0xFFFFFFFFu;
  // A batch from the device to the host.
  struct Copy : Arrival {
    bool alive = false;
    bool evicted = false;            // its slots are held; else its blocks are referenced
    RequestSlot owner = kNoRequest;  // by this request, or by the copy itself
    std::uint32_t before = kNoCopy;  // linked list of the owner's copies
    std::uint32_t after = kNoCopy;
    std::uint64_t number = 0;           // in order of creation
    std::vector<BlockIdentity> blocks;  // for the tiers below; empty when there are none
    std::vector<RoomWaiter> room_waiters;
  };
  struct Park {
    std::uint32_t pending = 0;  // loads
    std::vector<std::uint32_t> loads;
    std::vector<SlotId> pins;  // on the device, referenced unless a load of its own has them
    std::int64_t since_ns = 0;
    Origin origin;
    bool done = false;
  };
  enum class Phase : std::uint8_t { Landing, Staging, Loading };
  // Blocks on their way to the device for one request.
  struct Load {
    bool alive = false;
    bool failed = false;
    bool prefetch = false;  // wanted although no request waits
    Phase phase = Phase::Landing;
    std::uint32_t pending = 0;  // what the phase waits for
    std::uint32_t joins = 0;    // loads in flight of blocks before these
    std::int64_t start_ns = 0;
    std::int64_t eta_ns = 0;
    std::optional<TransferId> transfer;  // to the device, once started
    std::vector<BlockIdentity> blocks;
    std::vector<SlotId> to;    // on the device, reserved
    std::vector<SlotId> from;  // on the host, referenced (or reserved, until staged); kNoSlot until landed
    std::vector<Tier> tiers;
    std::vector<SlotId> shared;  // on the tier of tiers[i], referenced; kNoSlot when not from there
    std::vector<SlotId> pins;    // device blocks before and between these
    std::vector<RequestSlot> waiters;
    std::vector<std::uint32_t> followers;  // loads of blocks after these
    std::vector<BlockIdentity> joined;     // blocks of its chain that other loads bring
    bool ascends = false;                  // positions increase

    // Index in `blocks`; blocks.size() when absent.
    std::size_t place_of(const LineageHash& block) const;
    bool brings(const LineageHash& block) const { return place_of(block) < blocks.size(); }
    // Resets it for reuse; keeps the memory of short loads.
    void clear() noexcept;
  };
  struct Source {
    enum class Where : std::uint8_t { Resident, Landing, Loading };
    SlotId slot = kNoSlot;   // where it is or will be; none while loading
    std::uint32_t load = 0;  // the load that brings it to the device
    Tier tier = Tier::G2;
    Where where = Where::Resident;

    bool needs_load() const noexcept { return tier > Tier::G1 && where != Where::Loading; }
    bool needs_staging() const noexcept { return tier > Tier::G2 && where != Where::Loading; }
  };
  // Slots for the first `count` sources.
  struct Places {
    std::size_t count = 0;
    bool whole = false;             // all sources or none
    std::vector<SlotId> to{};       // on the device, for blocks that no other load brings
    std::vector<SlotId> staging{};  // on the host, for blocks from lower tiers
  };
  enum Role : std::uint32_t { kCopy, kLower, kStage, kLoad };

  void land(const Purpose& purpose, std::int64_t time_ns);

  // device_room.cpp
  void undo_eviction(std::span<const SlotId> out, std::size_t evicted);
  bool eviction_needs_copies(std::size_t slots);
  void wait_for(RequestSlot request, std::int64_t now_ns, Copy& copy);
  void wait_for_held(RequestSlot request, std::int64_t now_ns, std::uint64_t slots);
  void release_g1(std::span<const SlotId> slots);
  void give_back(std::span<const SlotId> slots);
  void set_held(std::uint64_t held, std::int64_t now_ns);

  // copy_down.cpp
  // Blocks to copy down, parents first.
  struct Chosen {
    std::span<const SlotId> slots;
    std::span<const BlockIdentity> blocks;
    std::span<const std::uint32_t> tags;  // by the host's store
  };
  bool offload(RequestSlot request, std::int64_t now_ns, std::span<SlotId> out, std::size_t evicted);
  Chosen select(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, std::span<std::uint32_t> tags,
                bool evicted);
  void apply_filter(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, bool evicted);
  void make_copies(std::int64_t now_ns, bool evicted, RequestSlot request, const Chosen& chosen);  // to copies_to_
  void start_copies(std::int64_t now_ns);
  bool may_start() const noexcept { return copying_ + starting_.size() < config_.offload_concurrency; }
  void hold_copies_of(RequestSlot request);
  void disown(Copy& copy);
  void copy_landed(std::uint32_t index, std::int64_t time_ns);
  bool copy_lower(std::int64_t now_ns, std::span<const SlotId> slots, std::span<const BlockIdentity> blocks,
                  std::span<std::uint8_t> kept);
  void start_lower(std::size_t tier, Arrivals::Id id, std::int64_t now_ns);
  void lower_landed(std::size_t tier, Arrivals::Id id, std::int64_t time_ns);

  // sources.cpp
  void locate(std::span<const BlockIdentity> blocks);
  void locate_lower(std::span<const BlockIdentity> blocks, std::size_t from);
  bool find(const BlockIdentity& block, std::size_t at, Source& source) const;
  const Arrival& arrival_of(const Source& source) const;
  std::int64_t eta(const Source& source, const Arrival& arrival) const;
  std::optional<TransferId> transfer_of(const Source& source) const;
  void find_sources(std::span<const BlockIdentity> blocks);
  std::size_t worthwhile(std::int64_t now_ns, std::size_t count,
                         const std::function<std::int64_t(std::size_t)>& saved_ns) const;
  std::size_t end_of_run(std::size_t first, std::size_t end) const;
  std::int64_t eta(std::int64_t now_ns, std::size_t count) const;
  std::span<const Source> first_sources(std::size_t count) const { return std::span(sources_).first(count); }

  // onboard.cpp
  SharedTier* shared_tier(Tier tier) const;
  void gather_sources(std::size_t from, std::size_t to);
  std::span<const SlotId> gathered(Tier tier) const { return gathered_[static_cast<std::size_t>(tier)]; }
  void pin(std::size_t from, std::size_t to);
  void unpin(std::size_t from, std::size_t to);
  void bring(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix,
             std::span<const BlockIdentity> blocks, const Places& places, Origin origin);
  std::size_t trim_device_tail(std::size_t count) const;
  Room reserve(RequestSlot request, std::int64_t now_ns, std::span<const SlotId> prefix, Places& places);
  void drop_staged_sources(Places& places);
  std::size_t cut_before_staging(Places& places);
  void join_loads(Park& park, std::span<const SlotId> prefix, std::size_t count);
  void wait_for_loads(RequestSlot request, Park park);

  // load_up.cpp
  std::uint32_t begin_load(std::int64_t now_ns, std::span<const BlockIdentity> blocks, const Places& places,
                           std::span<const SlotId> prefix);
  void next_phase(std::uint32_t index, std::int64_t time_ns);
  void stage(std::uint32_t index, std::int64_t time_ns);
  void staged(std::uint32_t index, std::int64_t time_ns);
  void commit_scattered(Load& load, SharedTier& shared);
  void start_load(std::uint32_t index, std::int64_t time_ns);
  bool unwanted(std::uint32_t index) const;
  void drop(std::uint32_t index, std::int64_t time_ns);
  void finish(std::uint32_t index, std::int64_t time_ns);
  void end_load(std::uint32_t index, std::int64_t time_ns);
  void hold_parents(Load& follower, const Load& load);
  void unpark(RequestSlot request, bool failed, std::int64_t time_ns);
  bool fails(std::uint32_t index) const;

  void changed(std::int64_t time_ns) {
    if (on_change_) on_change_(time_ns);
  }

  TierConfig config_;
  TransferEstimate estimate_{config_};
  BlockStore& store_;
  TierRun& run_;
  TierDevice device_;
  std::function<void(std::int64_t)> on_change_;
  LinkPair host_;
  std::vector<LinkPair> tier_links_;   // to each shared tier
  HugeArray<std::uint32_t> reuse_{0};  // hits by device slot; empty when not needed

  ArrivalsOf<Copy> copies_;               // to the host
  std::vector<std::uint32_t> copies_of_;  // by request: the last copy that it owns
  std::vector<Purpose> starting_;         // to start next
  std::deque<std::uint32_t> queued_;      // after those
  std::uint32_t copying_ = 0;
  std::vector<std::uint64_t> starting_bytes_;  // scratch
  std::uint64_t copies_made_ = 0;

  std::array<std::deque<Arrivals::Id>, 2> queued_lower_;  // to each shared tier
  std::array<std::uint32_t, 2> copying_lower_{};

  std::vector<Load> loads_;
  std::vector<std::uint32_t> free_loads_;
  std::uint32_t loading_now_ = 0;  // transfers on the link up
  std::uint64_t loads_begun_ = 0;
  Tier failing_tier_ = Tier::G2;  // by a fault, as is the next
  double load_failure_rate_ = 0;
  std::uint64_t loads_ended_ = 0;
  InFlight loading_;  // to the device; values index loads_

  std::vector<Wait> waits_;
  std::unordered_map<RequestSlot, Park> parks_;
  std::size_t parked_ = 0;
  std::vector<RequestSlot> ready_;

  std::uint64_t held_ = 0;
  std::int64_t held_since_ns_ = 0;
  std::uint64_t g1_references_ = 0;
  std::uint64_t released_ = 0;
  std::uint64_t landings_ = 0;
  TierTotals totals_;
  bool keeps_load_times_ = false;
  std::vector<std::int64_t> onboard_ns_;

  // Scratch; never shrinks.
  std::vector<BlockIdentity> evicted_;
  std::vector<SlotId> evicted_slots_;
  std::vector<std::uint32_t> evicted_tags_;
  std::vector<std::uint32_t> chosen_;
  // By located block: slot on the device, slot on the host, slot of a copy on its way.
  std::vector<SlotId> above_;
  std::vector<SlotId> below_;
  std::vector<SlotId> coming_;
  struct Lower {
    std::vector<SlotId> here;
    std::vector<SlotId> coming;
    std::size_t end = 0;  // of the located range
  };
  std::array<Lower, 2> lower_;  // located in the shared tiers, from the first one needed
  std::vector<SlotId> used_;
  std::array<std::vector<SlotId>, 5> gathered_;  // by tier
  std::vector<std::uint32_t> source_tags_;
  std::vector<Source> sources_;  // of the blocks searched last
  std::vector<SlotId> copied_slots_;
  std::vector<BlockIdentity> copied_;
  std::vector<std::uint32_t> tags_;  // of write-through blocks, in the host's index
  std::vector<SlotId> copies_to_;
  std::vector<SlotId> others_;
  std::vector<std::uint8_t> kept_;
};

}  // namespace understudy
