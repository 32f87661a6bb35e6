// One worker's way down to the host and the tiers below, and back.
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
#include "tiers/in_flight.hpp"
#include "tiers/shared_tier.hpp"
#include "tiers/tier_config.hpp"
#include "tiers/tier_totals.hpp"
#include "tiers/transfer_estimate.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

// Pool 0 of the store is the device, pool 1 the host. Never reads a clock. The engine asks for slots and for loads;
// what comes of it later is told through `waiting` and `take_ready`.
class WorkerTiers final : public TransferOwner, public LandingWaiter {
 public:
  static constexpr RequestSlot kNobody = 0xFFFFFFFFu;
  static constexpr std::size_t kG1 = 0;
  static constexpr std::size_t kG2 = 1;

  WorkerTiers(const TierConfig& config, BlockStore& store, TierRun& run, const std::string& worker);

  const TierConfig& config() const noexcept { return config_; }
  // A policy of the user's is asked at the end of steps, and may fail there.
  bool asks_user_after_steps() const noexcept {
    return config_.mode == OffloadMode::WriteThrough && (config_.filter || store_.advised(kG2));
  }
  TransferHub& hub() noexcept { return run_.hub(); }
  const TransferHub& hub() const noexcept { return run_.hub(); }
  CallFlag& call_flag() noexcept { return run_.call_flag(); }
  const Way& host_way() const noexcept { return host_; }
  // From now on the links to and from a tier, and those of a tier that is shared, have this share of their bandwidths;
  // of links without a limit nothing changes. InvalidArgument when there is no such tier, or no limit at all.
  void set_link_share(std::int64_t now_ns, Tier tier, double share);

  // Called after every landing that may have changed a block of this worker's, with its time.
  void set_on_change(std::function<void(std::int64_t)> on_change) { on_change_ = std::move(on_change); }

  // Called before a landing changes anything that this worker's steps could see, with its time, while it is watched.
  // `samples_only`: nothing on the device changes, nor does anybody wait for it, so that a step sees it in its sample
  // alone.
  using BeforeLanding = std::function<void(std::int64_t time_ns, bool samples_only)>;
  void set_before_landing(BeforeLanding before) { before_landing_ = std::move(before); }
  void watch_landings(bool on) noexcept { watched_ = on; }

  // ── Room on the device ──
  enum class Room : std::uint8_t {
    Taken,
    Short,  // there is none, nor will there be
    Wait,   // slots are held until their copies have left; `waiting` until then
  };
  // All of `out` or nothing. Evicts; what qualifies for the host is copied first.
  Room take(RequestSlot who, std::int64_t now_ns, std::span<SlotId> out);
  bool waiting(RequestSlot who) const noexcept { return who < waits_.size() && waits_[who].remaining > 0; }
  void stop_waiting(RequestSlot who, std::int64_t now_ns);
  std::int64_t waited_ns(RequestSlot who) const noexcept { return who < waits_.size() ? waits_[who].total_ns : 0; }
  // The same, of a request that has ended; another may have its name from now on.
  std::int64_t take_waited_ns(RequestSlot who) noexcept {
    return who < waits_.size() ? std::exchange(waits_[who].total_ns, 0) : 0;
  }
  // Grows with every slot that copies and loads made free on the device.
  std::uint64_t released() const noexcept { return released_; }
  void note_hits(std::span<const SlotId> slots);

  // ── Copies down ──
  // Blocks of a request on the device that have just been computed, or hit: under write-through those missing below
  // are copied. The copies trust in the request's references until it says otherwise.
  void write_through(RequestSlot who, std::int64_t now_ns, std::span<const SlotId> slots,
                     std::span<const BlockIdentity> blocks);
  // Before the request drops a reference, or asks how many there are: copies of its blocks have their own from now on.
  void hold_copied(RequestSlot who) {
    if (who < copies_of_.size() && copies_of_[who] != kNoCopy) hold_copies_of(who);
  }

  // ── Loads up ──
  enum class Onboard : std::uint8_t {
    Miss,    // nothing to load, or no room to load it to
    Slow,    // it is computed sooner
    Parked,  // the blocks are on their way: `take_ready` names the request
    Retry,   // no slots at the moment: ask again when `waiting` is over
  };
  // `prefix`: the leading hits on the device; `blocks`: what follows them. `saved_ns(n)` is the time that not computing
  // the first n of them saves.
  Onboard onboard(RequestSlot who, std::int64_t now_ns, std::span<const SlotId> prefix,
                  std::span<const BlockIdentity> blocks, const std::function<std::int64_t(std::size_t)>& saved_ns);
  // A request was admitted without what would have been slow.
  void note_slow() noexcept { ++totals_.slow_loads; }
  // As `onboard`, for blocks that somebody will want, into room that is there without a copy. True when something is on
  // its way; else nothing has changed.
  bool prefetch(std::int64_t now_ns, std::span<const BlockIdentity> blocks);
  // Requests whose loads have ended (or failed), in that order.
  std::vector<RequestSlot> take_ready() { return std::exchange(ready_, {}); }
  bool has_ready() const noexcept { return !ready_.empty(); }
  std::size_t parked() const noexcept { return parked_ + ready_.size(); }  // and not taken since
  // The request is gone, or was never parked; what is under way goes on to its end.
  void abandon(RequestSlot who);
  // Where each block behind the prefix came from when the request was last loaded, and that position; forgets it.
  struct Origin {
    std::size_t first_block = 0;
    std::vector<Tier> tiers;
    std::int64_t parked_ns = 0;
    bool failed = false;
  };
  std::optional<Origin> take_origin(RequestSlot who);
  // The answer for each of the leading blocks, ended by the first miss.
  std::vector<TierAnswer> lookup(std::span<const BlockIdentity> blocks);

  // ── Watch ──
  std::uint64_t held() const noexcept { return held_; }
  std::uint64_t g1_references() const noexcept { return g1_references_; }  // of ours, held and reserved slots included
  bool idle() const noexcept;
  // So far: of its transfers, and of blocks that its loads waited for, whoever brought those.
  std::uint64_t landings() const noexcept { return landings_; }
  std::uint64_t loads_ended() const noexcept { return loads_ended_; }  // or failed, so far
  const TierTotals& totals() const noexcept { return totals_; }
  // How long each load took that ended, failed ones included, if that is kept.
  void keep_load_times() noexcept { keeps_load_times_ = true; }
  const std::vector<std::int64_t>& onboard_ns() const noexcept { return onboard_ns_; }
  void check() const;

  // ── Called by transfers ──
  void landed(const Errand& errand, std::int64_t time_ns) override;
  void source_landed(std::uint32_t load, std::uint32_t block, SlotId slot, std::int64_t time_ns) override;

 private:
  struct Wait {
    std::uint32_t remaining = 0;
    std::uint32_t epoch = 0;  // grows when it stops waiting, so that old copies no longer count
    std::int64_t since_ns = 0;
    std::int64_t total_ns = 0;
  };
  struct RoomWaiter {
    RequestSlot who;
    std::uint32_t epoch;
  };
  static constexpr std::uint32_t kNoCopy = 0xFFFFFFFFu;
  // A batch from the device to the host.
  struct Copy : Arrival {
    bool alive = false;
    bool evicted = false;            // its slots are held; else its blocks are referenced,
    RequestSlot owner = kNobody;     // by this request, or by the copy itself
    std::uint32_t before = kNoCopy;  // others of the owner's
    std::uint32_t after = kNoCopy;
    std::uint64_t number = 0;           // in the order in which they were made
    std::vector<BlockIdentity> blocks;  // for the tiers below; empty when there are none
    std::vector<RoomWaiter> room_waiters;
  };
  struct Park {
    std::uint32_t pending = 0;  // loads
    std::vector<std::uint32_t> loads;
    std::vector<SlotId> pins;  // on the device, while no load of its own has them
    std::int64_t since_ns = 0;
    Origin origin;
    bool done = false;
  };
  enum class Phase : std::uint8_t { Landing, Staging, Loading };
  // Blocks on their way to the device for one request.
  struct Load {
    bool alive = false;
    bool failed = false;
    bool prefetch = false;  // wanted though nobody waits
    Phase phase = Phase::Landing;
    std::uint32_t pending = 0;  // of the phase
    std::uint32_t joins = 0;    // loads under way of blocks before these
    std::int64_t start_ns = 0;
    std::int64_t eta_ns = 0;
    std::optional<TransferId> transfer;  // to the device, once that is under way
    std::vector<BlockIdentity> blocks;
    std::vector<SlotId> to;    // on the device, reserved
    std::vector<SlotId> from;  // on the host, referenced (or reserved, until staged); kNoSlot until landed
    std::vector<Tier> tiers;
    std::vector<SlotId> shared;  // on the tier of tiers[i], referenced; kNoSlot when not from there
    std::vector<SlotId> pins;    // of blocks before and between, on the device
    std::vector<RequestSlot> waiters;
    std::vector<std::uint32_t> followers;  // loads of blocks behind these
    std::vector<BlockIdentity> joined;     // of its own way, blocks that other loads bring
    bool ascends = false;                  // its blocks stand as in a chain, each behind the one before

    // Of `blocks`; their number when it is none of them.
    std::size_t place_of(const LineageHash& block) const;
    bool brings(const LineageHash& block) const { return place_of(block) < blocks.size(); }
    // As it was before it began. Keeps the memory.
    void clear() noexcept;
  };
  struct Source {
    enum class Where : std::uint8_t { Resident, Landing, Loading };
    SlotId slot = kNoSlot;   // where it is, or will be; none while it is loading
    std::uint32_t load = 0;  // that brings it to the device
    Tier tier = Tier::G2;
    Where where = Where::Resident;

    bool needs_load() const noexcept { return tier > Tier::G1 && where != Where::Loading; }
    bool needs_staging() const noexcept { return tier > Tier::G2 && where != Where::Loading; }
  };
  // Where the first `count` of sources_ go.
  struct Places {
    std::size_t count = 0;
    std::vector<SlotId> to{};       // on the device, for those that no other load brings
    std::vector<SlotId> staging{};  // on the host, for those of the tiers below it
  };
  enum Role : std::uint32_t { kCopy, kLower, kStage, kLoad };

  void land(const Errand& errand, std::int64_t time_ns);

  // device_room.cpp
  bool evicts_what_it_must_copy(std::size_t slots);
  void wait_for(RequestSlot who, std::int64_t now_ns, Copy& copy);
  void wait_for_held(RequestSlot who, std::int64_t now_ns, std::uint64_t slots);
  void release_g1(std::span<const SlotId> slots);
  void give_back(std::span<const SlotId> slots);
  void set_held(std::uint64_t held, std::int64_t now_ns);

  // copy_down.cpp
  // What goes down: blocks of the device, parents first.
  struct Chosen {
    std::span<const SlotId> slots;
    std::span<const BlockIdentity> blocks;
    std::span<const std::uint32_t> tags;  // by the host's store
  };
  bool offload(RequestSlot who, std::int64_t now_ns, std::span<SlotId> out, std::size_t evicted);
  Chosen select(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, std::span<std::uint32_t> tags,
                bool evicted);
  void ask_filter(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks, bool evicted);
  void make_copies(std::int64_t now_ns, bool evicted, RequestSlot who, const Chosen& chosen);  // to copies_to_
  void start_copies(std::int64_t now_ns);
  bool may_start() const noexcept { return copying_ + starting_.size() < config_.offload_concurrency; }
  bool leaves_device_as_it_is(const Errand& errand) const;
  void hold_copies_of(RequestSlot who);
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
  std::size_t end_of_alike(std::size_t first, std::size_t end) const;
  std::int64_t eta(std::int64_t now_ns, std::size_t count) const;
  std::span<const Source> first_sources(std::size_t count) const { return std::span(sources_).first(count); }

  // onboard.cpp
  SharedTier* shared_tier(Tier tier) const;
  void gather_sources(std::size_t from, std::size_t to);
  std::span<const SlotId> gathered(Tier tier) const { return gathered_[static_cast<std::size_t>(tier)]; }
  void pin(std::size_t from, std::size_t to);
  void unpin(std::size_t from, std::size_t to);
  std::size_t up_to_last_below(std::size_t count) const;
  Room reserve(RequestSlot who, std::int64_t now_ns, std::span<const SlotId> prefix, Places& places);
  void do_without_staging(Places& places);
  std::size_t leave_out_staging(Places& places);
  void join_loads(Park& park, std::span<const SlotId> prefix, std::size_t count);
  void wait_for_loads(RequestSlot who, Park park);

  // load_up.cpp
  std::uint32_t begin_load(std::int64_t now_ns, std::span<const BlockIdentity> blocks, const Places& places,
                           std::span<const SlotId> prefix);
  void next_phase(std::uint32_t index, std::int64_t time_ns);
  void stage(std::uint32_t index, std::int64_t time_ns);
  void staged(std::uint32_t index, std::int64_t time_ns);
  void commit_scattered(Load& load, SharedTier& shared);
  void bring_up(std::uint32_t index, std::int64_t time_ns);
  bool unwanted(std::uint32_t index) const;
  void drop(std::uint32_t index, std::int64_t time_ns);
  void finish(std::uint32_t index, std::int64_t time_ns);
  void end_load(std::uint32_t index, std::int64_t time_ns);
  void hold_parents(Load& follower, const Load& load);
  void unpark(RequestSlot who, bool failed, std::int64_t time_ns);
  bool fails(std::uint32_t index) const;

  void changed(std::int64_t time_ns) {
    if (on_change_) on_change_(time_ns);
  }

  TierConfig config_;
  TransferEstimate estimate_{config_};
  BlockStore& store_;
  TierRun& run_;
  std::function<void(std::int64_t)> on_change_;
  BeforeLanding before_landing_;
  bool watched_ = false;
  bool counts_uses_ = false;  // a pool of the store's does
  Way host_;
  std::vector<Way> ways_;              // to each shared tier
  HugeArray<std::uint32_t> reuse_{0};  // hits by device slot; empty when nobody asks

  ArrivalsOf<Copy> copies_;               // on the host
  std::vector<std::uint32_t> copies_of_;  // by request, the last of those that it owns
  std::vector<Errand> starting_;          // those that go next
  std::deque<std::uint32_t> queued_;      // those behind them
  std::uint32_t copying_ = 0;
  std::vector<std::uint64_t> starting_bytes_;  // memory
  std::uint64_t copies_made_ = 0;

  std::array<std::deque<Arrivals::Id>, 2> queued_lower_;  // to each shared tier
  std::array<std::uint32_t, 2> copying_lower_{};

  std::vector<Load> loads_;
  std::vector<std::uint32_t> free_loads_;
  std::uint32_t loading_now_ = 0;  // on the link up
  std::uint64_t loads_begun_ = 0;
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

  // Scratch. What is longer than what it was last used for stays as long.
  std::vector<BlockIdentity> evicted_;
  std::vector<SlotId> evicted_slots_;
  std::vector<std::uint32_t> evicted_tags_;
  std::vector<std::uint32_t> chosen_;
  // Of the blocks that `locate` was asked for: where each is on the device and on the host; where a copy will be.
  std::vector<SlotId> above_;
  std::vector<SlotId> below_;
  std::vector<SlotId> coming_;
  struct Lower {
    std::vector<SlotId> here;
    std::vector<SlotId> coming;
    std::size_t end = 0;  // of what is known
  };
  std::array<Lower, 2> lower_;  // the same of the tiers of the run, from where somebody asked
  std::vector<SlotId> used_;
  std::array<std::vector<SlotId>, 5> gathered_;  // by tier
  std::vector<std::uint32_t> source_tags_;
  std::vector<Source> sources_;  // of the blocks that were looked for last
  std::vector<SlotId> copied_slots_;
  std::vector<BlockIdentity> copied_;
  std::vector<std::uint32_t> tags_;  // of what is written through, by the host's store
  std::vector<SlotId> copies_to_;
  std::vector<SlotId> rest_;
  std::vector<std::uint8_t> kept_;
};

}  // namespace understudy
