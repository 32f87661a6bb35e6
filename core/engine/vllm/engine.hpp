// A vLLM-style engine as a state machine that never reads a clock.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/announcer.hpp"
#include "engine/engine.hpp"
#include "engine/prefix_keeper.hpp"
#include "engine/timing.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/batch.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/connector/parts.hpp"
#include "engine/vllm/decode_state.hpp"
#include "engine/vllm/decode_sums.hpp"
#include "engine/vllm/groups/group_rows.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/nap.hpp"
#include "engine/vllm/onboarding.hpp"
#include "engine/vllm/pipeline.hpp"
#include "engine/vllm/scheduler.hpp"
#include "engine/vllm/step_reason.hpp"
#include "store/block_store.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

class FastForward;
class RunRows;
struct RankLoad;

// Step-exact with the real scheduler of the configured version. Synchronously a step is begin_step (schedules;
// admissions are visible at once) and end_step (tokens are visible). Asynchronously there are two batches: when one
// begins, the next is scheduled behind it, so a request submitted while batch s runs is first computed in batch s + 2.
class VllmEngine final : public Engine, public PrefixKeeper, private DecodeHost {
 public:
  VllmEngine(const VllmConfig& config, const EngineSite& site);
  ~VllmEngine() override;

  const VllmConfig& config() const noexcept { return config_; }

  // ── Requests ──
  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  void set_admitting(bool on) override;  // while off, `advance` raises WrongState: drivers step
  bool drained() const override;
  void forget_cache(std::int64_t now_ns) override;  // drops every unreferenced block of the device
  // Drop what the connector stores, and the blocks of the device if none is in use (vLLM: reset_prefix_cache with
  // reset_connector). False: blocks are in use, or the connector cannot.
  bool reset_caches(std::int64_t now_ns);
  void set_slowdown(double factor) override;
  void set_link_share(std::int64_t now_ns, Tier tier, double share) override;
  void set_load_failures(Tier tier, double rate) override;
  std::vector<std::int64_t> gaps_of(RequestId id) const override;
  const EngineRequest& request(RequestId id) const { return scheduler_->request(id); }
  // No request is here.
  bool idle() const noexcept {
    return scheduler_->running().empty() && num_waiting() == 0 && !plans() && scheduler_->counts().parked == 0;
  }
  void finish_transfers() override;
  std::int64_t next_landing_ns() const override;
  const Effects& land(std::int64_t now_ns) override;
  bool has_transfers() const override;

  // Prefetch the prefix that lower tiers have. True when a load has started.
  bool prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns);
  // Answers for the leading blocks, up to and including the first miss. With several KV groups: for the units of their
  // longest hit, each with the answer of its slowest block.
  std::vector<TierAnswer> tier_lookup(std::span<const BlockIdentity> blocks);
  CallFlag& call_flag() noexcept override { return tiers_ ? tiers_->call_flag() : Engine::call_flag(); }

  // ── Steps ──
  // Throws InvalidArgument when the engine or its transfers have advanced past `now_ns`, or when `now_ns` is after
  // kLatestNs, except for the end of a begun step: even a step of years from there has a valid end time.
  void require_time(std::int64_t now_ns) const;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t end_ns) override;
  const Effects& advance(std::int64_t until_ns, const AdvanceOptions& options) override;
  std::int64_t next_visible_ns() const override;
  const Effects& transfers_landed(std::int64_t now_ns) override;
  bool in_step() const noexcept { return clock_.in_step; }
  void skip_to(std::int64_t time_ns) noexcept;  // advances the clock of an idle engine
  Stall stall() const override;
  EngineSnapshot snapshot() const override;
  TierReport tier_report() override;
  GroupReport group_report() const override { return grouped_ != nullptr ? grouped_->report() : GroupReport{}; }
  const Residency& residency() const noexcept override;
  std::size_t cached_prefix(std::span<const BlockIdentity> blocks) const override;
  void keep_times() override;
  void take_gaps(GapSum& out) override { token_log_.take_gaps(out); }
  std::vector<EngineSample> samples() const override { return token_log_.samples(); }
  void describe_step(StepView& out) const override;

  // ── Events: with config().events, rows of both streams since the last call ──
  // On the device a row is visible at the end of its step (or at once, when none is open), on tiers below when it
  // happened.
  using Engine::take_events;
  void take_events(TimedEvents& out) override { announcer_.take_visible(out); }
  std::size_t published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) override;  // published_blocks
  std::vector<TimedKvTrace> take_kv_trace() override { return kv_->take_trace(); }

  // Raises InvariantViolated when requests, blocks and (with config().check) events contradict each other. O(blocks).
  void check() override;
  StateDigest digest(bool with_cached) const override;

 private:
  friend class RankGroup;     // whose ranks step together
  friend class VllmView;      // what it shows of itself
  friend class VllmParts;     // what bindings call
  friend class VllmLockstep;  // recorded steps

  static constexpr std::uint64_t kThrashing = 1 << 17;  // fruitless preemptions: far more than real progress has
  using Room = KvBackend::Room;

  // requests.cpp
  void require_servable(const RequestSpec& spec) const;
  std::size_t num_waiting() const noexcept { return scheduler_->waiting().size(); }
  bool quiescent() const;  // no request is here that may go on
  void on_requests_changed();
  void read_input(std::int64_t now_ns);

  // prefixes.cpp, called through the interface
  std::optional<std::string> why_no_prefixes() const override;
  const Effects& keep_prefix(const PrefixCall& call, std::int64_t now_ns) override;
  PrefixTotals prefix_totals(std::int64_t now_ns) const override { return scheduler_->held().totals_at(now_ns); }
  KvRequest reference_prefix(const PrefixCall& call, std::int64_t now_ns);
  void offload_prefix(const PrefixCall& call, std::int64_t now_ns);

  // tiers.cpp
  void require_tiers() const;
  void require_group_tiers(const char* call) const;  // WrongState under vLLM's offload
  // Leading units of hashing (one group: blocks) that may be copied down.
  std::uint32_t num_keyed(const EngineRequest& request) const;
  void write_through(const std::vector<Scheduled>& turns, std::int64_t now_ns);
  void notice_landings(std::int64_t now_ns) override;
  void report_idle_landings();
  FetchStages fetch_stages() const;

  // setup.cpp, setup_connector.cpp
  void make_kv(const EngineSite& site);
  std::unique_ptr<Connector> make_offloading();
  std::unique_ptr<Connector> make_nixl(const EngineSite& site);
  std::unique_ptr<Connector> make_connector(const EngineSite& site);
  DecodeState decode_state();

  // nap.cpp
  bool is_polling() const noexcept { return nap_.on && nap_.polls; }
  bool is_asleep() const noexcept { return nap_.on && !nap_.polls; }
  bool nap_over() const noexcept;
  std::int64_t nap_until_ns() const;
  bool wake_up(std::int64_t until_ns);
  bool found_work(std::int64_t now_ns);
  bool waits_for_copies();
  bool only_polls(bool reported) const noexcept;
  void poll_idle(bool changed, std::int64_t now_ns);
  std::int64_t poll_at(std::int64_t time_ns) const noexcept;
  bool handoff_pending() const noexcept;  // blocks are kept for a peer, or a notification is due
  bool rests() const noexcept { return idle() && !(polls_ && handoff_pending()); }  // nothing to do
  std::int64_t begin_transfers_alone(std::int64_t now_ns);
  bool still_offloads() const;
  void update_from_connector(const ConnectorOutput& output, std::int64_t now_ns);
  void report_offload(std::vector<JobId> done, std::int64_t now_ns);
  void offload_after_step(std::int64_t now_ns) override;

  // step.cpp, pipeline.cpp
  const StepLoad& open_load() const noexcept { return config_.async_scheduling || pipeline_ ? open_.load : load_; }
  const std::vector<Scheduled>& batch() const noexcept;  // of the open step
  std::int64_t retime_step(const RankLoad& ranks);
  void begin_recorded_step(std::int64_t now_ns);
  bool plans() const noexcept { return !planned_.empty() || (pipeline_ && pipeline_->computes()); }  // a later batch
  void sync_to(std::int64_t now_ns);
  void begin_one_step(std::int64_t now_ns);
  void begin_pipelined_step(std::int64_t now_ns);
  bool schedule_in_pipeline(std::int64_t now_ns);
  std::int64_t try_schedule(std::int64_t now_ns);
  Batch take_batch(std::int64_t duration_ns);
  void measure();
  void count_time(const StepLoad& load, std::int64_t duration_ns) noexcept;
  void open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns);
  void finish_step(std::int64_t end_ns);
  void close_step();
  void play(std::int64_t until_ns, const AdvanceOptions& options);
  void clear_returned_effects();
  const Effects& return_effects();
  void report_batch();
  bool thrashing() const noexcept { return scheduler_->counts().fruitless_preemptions > kThrashing; }

  // can_fast_forward.cpp
  // None: every running request decodes or waits for room, and no request can be admitted until one of them ends.
  std::optional<StepReason> why_step() const;
  bool waits(RequestSlot slot) const { return tiers_ && tiers_->waiting(slot); }
  bool begins_in_order() const;
  bool may_fail_load() const noexcept;
  // No later than what has reached this worker, or what it must send.
  std::int64_t quiet_until(std::int64_t until_ns) const { return std::min(until_ns, connector_->next_event_ns()); }
  bool are_loads_quiet() const;
  bool is_offload_quiet() const;
  bool plans_all_tokens() const;
  bool plans_next_token(const Scheduled& turn, RequestSlot slot) const;
  // Asynchronously: the planned batch computes the next token of every running request.
  bool plans_next_tokens() const;
  bool plans_all_but_waiting() const;
  bool fast_forward(std::int64_t until_ns, bool stop_on_finish);
  bool landed(std::int64_t now_ns) override;
  void offload_computed(const std::vector<Scheduled>& filled, std::int64_t end_ns) override;
  bool report_offloads(std::int64_t end_ns) override;
  bool changed_below() const override;
  void progressed(std::uint64_t steps) override;
  bool head_may_move() const override { return scheduler_->head_may_move(); }
  bool head_stays() const override { return scheduler_->head_stays(); }
  void finish(RequestSlot slot, std::int64_t end_ns) override { scheduler_->finish(slot, end_ns); }
  void fold_token_log() override { scheduler_->fold_token_log(); }

  // finish_bound.cpp
  std::uint32_t expected_outputs(const EngineRequest& request) const noexcept;  // when it has run to its end
  std::uint64_t steps_to_finish(const EngineRequest& request) const noexcept;
  std::optional<Outlook> outlook() const;
  bool has_room_for_all() const;
  std::int64_t finish_bound() const;

  // step_view.cpp
  StepEntry entry_of(const Scheduled& turn) const;
  AdmissionStop why_waiting() const;

  // watch.cpp
  Phase phase() const;
  std::int64_t wake_ns() const;
  std::vector<RequestId> waiting(std::size_t count) const;  // the first `count`
  void sample(std::size_t running, std::int64_t time_ns) override;
  void sample_blocks(std::int64_t time_ns);
  void add_sample(std::int64_t time_ns, std::uint32_t running, std::uint32_t waiting);
  void check_counts(bool whole) const;
  std::uint64_t blocks_behind() const;
  void check_state();
  void reach_checkpoint(bool fast_forwarded);

  VllmConfig config_;
  StepTiming timing_;
  BlockStore store_;
  Announcer announcer_;
  std::unique_ptr<TierRun> own_run_;
  std::unique_ptr<WorkerTiers> tiers_;
  std::unique_ptr<KvBackend> kv_;          // whose blocks are those of store_, unless there are runs or groups
  RunRows* run_rows_ = nullptr;            // of a backend of runs; null: of another
  GroupedBackend* grouped_ = nullptr;      // the same, with several KV cache groups
  std::unique_ptr<GroupRows> group_rows_;  // null: one group, or events of groups are taken as they are
  std::uint64_t capacity_tokens_;
  std::optional<Onboarding> onboarding_;
  std::unique_ptr<Connector> connector_;
  ConnectorParts parts_;
  OffloadConnector* offload_ = nullptr;    // part of it; null: none
  OffloadLinks* offload_links_ = nullptr;  // the same
  bool polls_ = false;                     // without tokens to compute the engine polls it
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<RequestSlot> unread_;  // requests submitted since the engine last read its queue

  // Batches.
  StepLoad load_;                       // of the last schedule
  Batch open_;                          // asynchronously: the batch of the open step
  Batch planned_;                       // the batch behind it
  std::unique_ptr<Pipeline> pipeline_;  // batches in flight; null: one stage

  // Time.
  StepClock clock_;
  Nap nap_;
  std::optional<std::uint64_t> stuck_;                // free blocks when the engine got stuck
  mutable std::optional<std::int64_t> finish_bound_;  // no_finish_before, valid until something changes
  std::optional<std::uint64_t> released_before_;      // by tiers, when a schedule with groups only preempted
  std::uint64_t landings_noticed_ = 0;
  bool fast_forwards_ = true;
  std::array<std::uint64_t, kNumStepReasons> stepped_{};  // steps of `advance` that were simulated by themselves
  std::unique_ptr<FastForward> fast_forward_;

  // Watch.
  Effects effects_;
  bool effects_returned_ = false;
  bool reports_batches_ = false;
  EngineTotals totals_;
  std::uint64_t steps_at_check_ = 0;  // when everything was last compared, with config().check
  TokenLog token_log_;
  std::function<void(Engine&, bool ended)> observer_;
  std::function<void(Engine&, bool fast_forwarded)> on_checkpoint_;
};

}  // namespace understudy
