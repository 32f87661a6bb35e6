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
#include <unordered_map>
#include <vector>

#include "engine/announcer.hpp"
#include "engine/engine.hpp"
#include "engine/prefix_keeper.hpp"
#include "engine/timing.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/admission.hpp"
#include "engine/vllm/batch.hpp"
#include "engine/vllm/burst_sampler.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/connector/parts.hpp"
#include "engine/vllm/decode_state.hpp"
#include "engine/vllm/decode_sums.hpp"
#include "engine/vllm/groups/group_rows.hpp"
#include "engine/vllm/held_prefixes.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/left_blocks.hpp"
#include "engine/vllm/live_request.hpp"
#include "engine/vllm/pipeline.hpp"
#include "engine/vllm/prefill_interval.hpp"
#include "engine/vllm/step_reason.hpp"
#include "engine/vllm/waiting_queues.hpp"
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
  const EngineRequest& request(RequestId id) const;  // that has not ended; else InvalidArgument
  // No request is here.
  bool idle() const noexcept { return running_.empty() && num_waiting() == 0 && !plans() && parked_ == 0; }
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
  std::size_t num_waiting() const noexcept { return queues_.size(); }
  bool quiescent() const { return idle() || (!admitting_ && drained()); }  // no request is here that may go on
  void on_requests_changed();
  void read_input(std::int64_t now_ns);
  void retire(EngineRequest& request, bool aborted, std::int64_t now_ns);
  void complete(RequestSlot slot, std::int64_t now_ns);
  RequestRecord take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns);

  // schedule.cpp
  std::int64_t schedule(std::int64_t now_ns);
  void undo_schedule();
  const Scheduled* scheduled_before(RequestId id) const;
  void schedule_running(std::int64_t now_ns);
  std::uint32_t next_tokens(const EngineRequest& request) const;
  std::uint32_t prefill_cap() const;
  std::size_t max_running() const noexcept { return std::min(config_.max_num_seqs, config_.max_num_active_seqs); }
  std::size_t choose_victim() const;
  void preempt(std::size_t position, RequestId by);
  void measure();
  void count_time(const StepLoad& load, std::int64_t duration_ns) noexcept;
  bool can_add() const noexcept { return budget_ > 0 && input_budget_ > config_.speculation.draft_slots; }
  void charge(std::uint32_t tokens) noexcept;

  // admit.cpp
  bool admit(std::int64_t now_ns);
  void admit_waiting(std::int64_t now_ns);
  bool can_try(EngineRequest& request, std::int64_t now_ns);
  void note_adapters();
  void note_adapter(const EngineRequest& request);
  bool lacks_adapter(const EngineRequest& request) const;
  bool only_decodes() const;
  Admission look_up(RequestSlot slot);
  // More than the token that is sampled from.
  bool computes_prompt(const Admission& head) const { return head.hit_tokens + 1 < requests_[head.slot].known; }
  bool size_up(Admission& head, bool decodes_only, bool joins) const;
  bool fits(const Admission& head);
  void refuse(const Admission& head);
  void enter(const Admission& head, std::int64_t now_ns);
  std::uint32_t blocks_for(std::uint32_t tokens) const noexcept {
    return (tokens + config_.block_size - 1) / config_.block_size;
  }
  std::uint32_t room_up_to(const EngineRequest& request, std::uint32_t total, bool admission) const noexcept;

  // prefixes.cpp, called through the interface
  std::optional<std::string> why_no_prefixes() const override;
  const Effects& keep_prefix(const PrefixCall& call, std::int64_t now_ns) override;
  PrefixTotals prefix_totals(std::int64_t now_ns) const override { return held_.totals_at(now_ns); }
  KvRequest reference_prefix(const PrefixCall& call, std::int64_t now_ns);
  void offload_prefix(const PrefixCall& call, std::int64_t now_ns);
  bool yield_hold(std::int64_t now_ns);

  // tiers.cpp
  WorkerTiers::Onboard onboard(const Admission& head, std::int64_t now_ns);
  void park(EngineRequest& request);
  void require_group_tiers(const char* call) const;  // WrongState under vLLM's offload
  bool prefetch_groups(std::span<const BlockIdentity> blocks, std::int64_t now_ns);
  WorkerTiers::Onboard onboard_groups(RequestSlot request, std::int64_t now_ns, std::span<const BlockIdentity> units,
                                      std::uint32_t known, std::uint32_t limit,
                                      const std::function<std::int64_t(std::size_t)>& saved_ns);
  // Leading units of hashing (one group: blocks) that may be copied down.
  std::uint32_t num_keyed(const EngineRequest& request) const;
  void resume_loaded();
  void count_origins(const Admission& head, bool resumed);
  void write_through(const std::vector<Scheduled>& turns, std::int64_t now_ns);
  void notice_landings(std::int64_t now_ns) override;
  void report_idle_landings();
  bool landing_wait_over() const noexcept;
  bool waits_for_copies();
  bool head_may_move() const override;
  bool head_stays() const override;
  bool head_lacks_room() const;

  // setup.cpp
  std::unique_ptr<Connector> make_offloading();
  std::unique_ptr<Connector> make_nixl(const EngineSite& site);
  std::unique_ptr<Connector> make_connector(const EngineSite& site);
  void connect(const EngineSite& site);

  // handoff.cpp
  void require_leg(const RequestSpec& spec) const;
  bool handoff_pending() const noexcept;  // blocks are kept for a peer, or a notification is due
  void give_up_load(EngineRequest& request);
  bool only_polls(bool reported) const noexcept;
  void poll_idle(bool changed, std::int64_t now_ns);
  std::int64_t poll_at(std::int64_t time_ns) const noexcept;  // the first schedule of that loop from `time_ns` on
  std::int64_t next_poll_ns() const;
  bool rests() const noexcept { return idle() && !(polls_ && handoff_pending()); }  // nothing to do
  bool begins_in_order() const;
  bool may_fail_load() const noexcept;
  // No later than what has reached this worker, or what it must send.
  std::int64_t quiet_until(std::int64_t until_ns) const { return std::min(until_ns, connector_->next_event_ns()); }
  bool are_loads_quiet() const;
  void drop_in_flight(const EngineRequest& victim);
  void fail(RequestSlot slot, std::int64_t now_ns);

  // offload.cpp
  std::optional<std::uint32_t> external_tokens(Admission& head, std::int64_t now_ns);
  Admission loaded_head(EngineRequest& request, std::int64_t now_ns);
  void count_loaded(EngineRequest& request, bool resumed);
  std::optional<std::uint32_t> look_below(Admission& head, std::int64_t now_ns);
  bool place_load(const Admission& head, std::uint32_t tokens, std::int64_t now_ns);
  void begin_load(EngineRequest& request, std::uint32_t local, std::uint32_t tokens, std::int64_t now_ns);
  void promote(EngineRequest& request, std::int64_t now_ns);
  bool fits_behind(const Admission& head) const;
  std::uint64_t lacking() const;
  void close_connector(std::size_t admitted_before, std::int64_t now_ns);
  void end_group_schedule();
  void leave(EngineRequest& request, bool aborted, std::int64_t now_ns);
  bool freeable(std::uint64_t last_step) const noexcept { return !fenced_ || last_step <= counts_.processed; }
  void release_or_defer(EngineRequest& request);
  void free_deferred(bool computed);
  std::int64_t begin_transfers_alone(std::int64_t now_ns);
  bool still_offloads() const;
  void update_from_connector(const ConnectorOutput& output, std::int64_t now_ns);
  void report_offload(std::vector<JobId> done, std::int64_t now_ns);
  void offload_after_step(std::int64_t now_ns) override;
  FetchStages fetch_stages() const;
  std::uint64_t check_offload() const;

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
  bool found_work(std::int64_t now_ns);
  void open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns);
  void finish_step(std::int64_t end_ns);
  void close_step();
  void play(std::int64_t until_ns, const AdvanceOptions& options);
  void clear_returned_effects();
  const Effects& return_effects();
  void report_batch();
  bool thrashing() const noexcept { return fruitless_preemptions_ > kThrashing; }

  // can_fast_forward.cpp
  // None: every running request decodes or waits for room, and no request can be admitted until one of them ends.
  std::optional<StepReason> why_step() const;
  bool is_offload_quiet() const;
  bool plans_all_tokens() const;
  bool plans_next_token(const Scheduled& turn, RequestSlot slot) const;
  // Asynchronously: the planned batch computes the next token of every running request.
  bool plans_next_tokens() const;
  bool plans_all_but_waiting() const;
  DecodeState decode_state();
  bool fast_forward(std::int64_t until_ns, bool stop_on_finish);
  bool landed(std::int64_t now_ns) override;
  void offload_computed(const std::vector<Scheduled>& filled, std::int64_t end_ns) override;
  void finish(RequestSlot slot, std::int64_t end_ns) override;
  bool report_offloads(std::int64_t end_ns) override;
  bool changed_below() const override;
  void progressed(std::uint64_t steps) override;

  // receive.cpp
  void receive_tokens(const std::vector<Scheduled>& turns, std::int64_t end_ns);
  bool receive_token(const Scheduled& turn, std::uint64_t step);
  void receive_drafts(EngineRequest& request, const Scheduled& turn);
  void receive_burst(EngineRequest& request);
  void fold_token_log() override;
  bool live(const Scheduled& turn) const noexcept;
  std::uint32_t outputs_left(const EngineRequest& request) const noexcept;

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
  std::uint64_t capacity_tokens_, watermark_blocks_;
  BurstSampler bursts_, acceptance_;

  // Requests.
  std::vector<EngineRequest> requests_;  // by slot
  std::vector<RequestSlot> free_slots_;
  std::unordered_map<RequestId, RequestSlot> slots_;  // requests that have not ended
  std::uint64_t num_submitted_ = 0;
  std::vector<RequestSlot> running_;
  std::vector<RequestSlot> prefills_in_flight_;  // prompts that are being loaded or computed in part
  WaitingQueues queues_;
  std::vector<RequestSlot> unread_;  // submitted since the engine last read its queue
  std::size_t parked_ = 0;
  bool admitting_ = true;
  HeldPrefixes held_;  // of sessions that sleep

  // The connector, and blocks that it and steps in flight still use.
  std::unique_ptr<Connector> connector_;
  std::size_t loading_ = 0;
  std::unique_ptr<ConnectorMetadata> meta_;  // orders of the last schedule
  ConnectorOutput polled_;                   // found by the last schedule's poll
  bool connected_ = false;                   // it is not the default
  bool loads_ = false;                       // prompts may come from elsewhere
  bool polls_ = false;                       // without tokens to compute the engine polls it
  bool recomputes_ = true;                   // a request whose load failed; else it fails
  bool fenced_ = false;                      // blocks are not freed while a step in flight may write them
  StepCounts counts_;
  LeftBlocks left_;
  bool has_ended_ = false;  // a request, since the last schedule
  ConnectorParts parts_;
  OffloadConnector* offload_ = nullptr;    // part of it; null: none
  OffloadLinks* offload_links_ = nullptr;  // the same
  bool polling_ = false;   // the last schedule had nothing to compute; the next is at clock_.now_ns or later
  bool poll_due_ = false;  // and something has changed since

  // State of the current schedule, and of the last one.
  std::uint64_t budget_ = 0;
  std::uint64_t input_budget_ = 0;  // less than the budget where a draft model takes slots
  std::uint32_t prefill_cap_ = VllmConfig::kUnlimited;
  PrefillInterval interval_;
  StepLog log_;
  StepLoad load_;
  Refusal refusal_;
  std::optional<FailedSchedule> failed_;
  std::vector<std::uint32_t> adapters_;  // adapters in the batch
  Batch open_;                           // asynchronously: the batch of the open step
  Batch planned_;                        // the batch behind it
  std::unique_ptr<Pipeline> pipeline_;   // batches in flight; null: one stage

  // Time.
  StepClock clock_;
  std::optional<std::uint64_t> stuck_;                // free blocks when the engine got stuck
  mutable std::optional<std::int64_t> finish_bound_;  // no_finish_before, valid until something changes
  std::uint64_t fruitless_preemptions_ = 0;           // since the last token
  LandingWait landing_wait_;
  std::optional<std::uint64_t> released_before_;  // by tiers, when a schedule with groups only preempted
  std::uint64_t landings_noticed_ = 0;
  bool fast_forwards_ = true;
  std::array<std::uint64_t, kNumStepReasons> stepped_{};  // steps of `advance` that were simulated by themselves
  std::unique_ptr<FastForward> fast_forward_;

  // Watch.
  Effects effects_;
  bool effects_returned_ = false;
  bool reports_batches_ = false;
  EngineTotals totals_;
  std::uint64_t steps_at_check_ = 0;        // when everything was last compared, with config().check
  std::vector<std::uint64_t> accepted_at_;  // size: most drafts of a round
  TokenLog token_log_;
  std::function<void(Engine&, bool ended)> observer_;
  std::function<void(Engine&, bool fast_forwarded)> on_checkpoint_;
};

}  // namespace understudy
