// A vLLM-style engine as a state machine that never reads a clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/exclusive_call.hpp"
#include "engine/announcer.hpp"
#include "engine/engine.hpp"
#include "engine/handoff_net.hpp"
#include "engine/kv_trace.hpp"
#include "engine/prefix_keeper.hpp"
#include "engine/timing.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/admission.hpp"
#include "engine/vllm/batch.hpp"
#include "engine/vllm/burst_sampler.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/connector/multi_connector.hpp"
#include "engine/vllm/connector/nixl_connector.hpp"
#include "engine/vllm/connector/offloading_connector.hpp"
#include "engine/vllm/decode_state.hpp"
#include "engine/vllm/decode_sums.hpp"
#include "engine/vllm/groups/group_rows.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"
#include "engine/vllm/held_prefixes.hpp"
#include "engine/vllm/kept_tables.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/live_request.hpp"
#include "engine/vllm/prefill_interval.hpp"
#include "engine/vllm/waiting_queues.hpp"
#include "store/block_store.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

class FastForward;
class RunRows;

// Ranks that step together: the tokens of all, and those to which each is padded (0: none is).
struct RankLoad {
  std::uint64_t tokens;
  std::uint64_t width;
};

// Step-exact with the real scheduler of the configured version. Synchronously a step is begin_step (schedules;
// admissions are visible at once) and end_step (tokens are visible). Asynchronously there are two batches: when one
// begins, the next is scheduled behind it, so a request submitted while batch s runs is first computed in batch s + 2.
class VllmEngine final : public Engine, public PrefixKeeper, private DecodeHost {
 public:
  VllmEngine(const VllmConfig& config, const EngineSite& site);
  ~VllmEngine() override;

  const VllmConfig& config() const noexcept { return config_; }
  BlockStore& store() noexcept { return store_; }
  GroupedBackend* grouped() noexcept { return grouped_; }  // null: one group
  const GroupedBackend* grouped() const noexcept { return grouped_; }
  PoolMetrics device_metrics() const { return kv_->metrics(); }
  std::uint64_t operations() const { return store_.operations() + kv_->operations(); }
  // Blocks that are handed out next, and each cached or referenced name once.
  std::vector<SlotId> free_head(std::size_t count) const { return kv_->free_head(count); }
  std::vector<std::uint64_t> cached_names() const { return kv_->contents(); }
  std::span<const RequestSlot> running_slots() const noexcept { return running_; }
  const BlockStore& store() const noexcept { return store_; }

  // ── Requests ──
  const Effects& submit(RequestSpec spec, std::int64_t now_ns) override;
  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  const Effects& cancel(RequestId id, std::int64_t now_ns) override;
  // While off, `advance` raises WrongState: drivers step.
  void set_admitting(bool on) override;
  bool drained() const override;
  // No request is here that may go on.
  bool quiescent() const { return idle() || (!admitting_ && drained()); }
  // Drops every unreferenced block of the device.
  void forget_cache(std::int64_t now_ns) override;
  // Drop what the connector stores, and the blocks of the device if none is in use (vLLM: reset_prefix_cache with
  // reset_connector). False: blocks are in use, or the connector cannot.
  bool reset_caches(std::int64_t now_ns);
  std::uint64_t num_submitted() const noexcept { return num_submitted_; }
  // One that has not ended; InvalidArgument when there is none.
  const EngineRequest& request(RequestId id) const;
  bool has(RequestId id) const { return slots_.contains(id); }
  // Tokens that it will have emitted when it has run to its end.
  std::uint32_t expected_outputs(const EngineRequest& request) const noexcept {
    return std::min(request.spec.outputs(), config_.max_model_len - request.spec.prompt_tokens);
  }
  std::vector<RequestId> running() const;
  std::vector<RequestId> waiting(std::size_t count) const;  // the first `count`
  std::size_t num_waiting() const noexcept { return queues_.size(); }
  std::size_t num_slots() const noexcept { return requests_.size(); }  // the most requests present at one time
  std::size_t steps_kept() const noexcept { return token_log_.steps_kept(); }
  std::int64_t room_wait_ns(RequestId id) const { return tiers_->waited_ns(slots_.at(id)); }
  // No request is here.
  bool idle() const noexcept { return running_.empty() && num_waiting() == 0 && planned_.empty() && parked_ == 0; }
  std::size_t parked() const noexcept { return parked_; }  // requests whose blocks are being loaded
  WorkerTiers* tiers() noexcept { return tiers_.get(); }
  const WorkerTiers* tiers() const noexcept { return tiers_.get(); }
  void finish_transfers() override;
  std::int64_t next_landing_ns() const override;
  const Effects& land(std::int64_t now_ns) override;
  bool has_transfers() const override {
    return tiers_ && (!tiers_->idle() || (offload_links_ && !offload_links_->idle()));
  }
  // ── Hand-offs: with config().transfer ──
  NixlConnector* nixl() noexcept { return nixl_; }     // null: none
  MultiConnector* multi() noexcept { return multi_; }  // null: one connector, or none
  KvSender* sender() noexcept { return sender_; }      // null: it keeps no blocks for others
  const KeptTables& kept() const noexcept { return kept_; }
  // Report the poll's results for the batch that was scheduled last; in lockstep, where the driver moves the blocks.
  void give_report(ConnectorOutput report);
  bool has_ended() const noexcept { return has_ended_; }  // a request, since the last schedule
  bool handoff_pending() const noexcept;                  // blocks are kept for a peer, or a notification is due
  std::uint64_t deferred_blocks() const noexcept;
  std::vector<RequestId> orphans() const;  // aborted requests whose blocks are still to come
  std::vector<RequestId> holding() const;  // waiting requests that hold blocks
  // In lockstep, asynchronously: let the batch that was scheduled last be the next to end, with no other behind it.
  void begin_last_update(std::int64_t now_ns);

  OffloadConnector* offload() noexcept { return offload_; }  // null: none
  const OffloadConnector* offload() const noexcept { return offload_; }
  bool offload_pending() const noexcept { return offload_ && (offload_->has_jobs() || offload_->has_ended_to_tell()); }
  std::vector<RequestId> loading() const;  // requests whose blocks are being loaded, in the order of the queues
  FetchStages fetch_stages() const;
  // Prefetch the prefix that lower tiers have. True when a load has started.
  bool prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns);
  // ── Prefixes of sessions ──
  std::optional<std::string> why_no_prefixes() const override;
  const Effects& keep_prefix(const PrefixCall& call, std::int64_t now_ns) override;
  PrefixTotals prefix_totals(std::int64_t now_ns) const override { return held_.totals_at(now_ns); }
  // Answers for the leading blocks, up to and including the first miss. With several KV groups: for the units of their
  // longest hit, each with the answer of its slowest block.
  std::vector<TierAnswer> tier_lookup(std::span<const BlockIdentity> blocks);
  TierRun* own_run() noexcept { return own_run_.get(); }
  CallFlag& call_flag() noexcept override { return tiers_ ? tiers_->call_flag() : Engine::call_flag(); }

  // ── Steps ──
  // Throws InvalidArgument when the engine or its transfers have advanced past `now_ns`, or when `now_ns` is after
  // kLatestNs, except for the end of a begun step: even a step of years from there has a valid end time.
  void require_time(std::int64_t now_ns) const;
  static constexpr std::int64_t kLatestNs = StepClock::kLatestNs;
  const Effects& begin_step(std::int64_t now_ns) override;
  const Effects& end_step(std::int64_t end_ns) override;
  const Effects& advance(std::int64_t until_ns, const AdvanceOptions& options) override;
  std::int64_t next_visible_ns() const override;
  const Effects& transfers_landed(std::int64_t now_ns) override;
  // A step as recordings count them: a schedule, and the update that follows it. Asynchronously that is the update of
  // the batch before, so that no time passes in between. Not to be mixed with begin_step and end_step.
  void begin_recorded_step(std::int64_t now_ns);
  const Effects& end_recorded_step(std::int64_t now_ns) { return end_step(now_ns); }
  // For ranks that step together: the tokens that the open step computes; and its new end, once the tokens of all ranks
  // are known.
  std::uint64_t step_tokens() const noexcept { return open_load().tokens; }
  std::int64_t retime_step(const RankLoad& ranks);
  std::uint64_t largest_graph() const noexcept { return timing_.model->largest_graph(); }
  bool in_step() const noexcept { return clock_.in_step; }
  std::int64_t now_ns() const noexcept {
    return clock_.now_ns;
  }  // the end of the open step, else when the next may begin
  std::int64_t wake_ns() const;
  Phase phase() const;
  const StepLog& log() const noexcept { return log_; }
  const std::vector<Scheduled>& batch() const noexcept {  // the batch of the open step
    return config_.async_scheduling ? open_.turns : log_.scheduled;
  }
  // Advance the clock of an idle engine.
  void skip_to(std::int64_t time_ns) noexcept {
    clock_.now_ns = polling_ ? poll_at(time_ns) : std::max(clock_.now_ns, time_ns);
    finish_bound_.reset();
  }
  void set_fast_forward(bool on) noexcept { fast_forwards_ = on; }
  // Requests preempt each other without end when the oldest must give way: preemption_mode fifo, or equal priorities.
  bool stuck() const noexcept { return stuck_.has_value(); }
  Stall stall() const override;
  bool asleep() const noexcept { return landing_wait_.on; }

  // Effects of the last call of end_step or advance that have not been taken.
  Effects take_effects() { return std::exchange(effects_, {}); }

  EngineSnapshot snapshot() const override;
  TierReport tier_report() override;
  GroupReport group_report() const override { return grouped_ != nullptr ? grouped_->report() : GroupReport{}; }
  const Residency& residency() const noexcept override;
  std::size_t cached_prefix(std::span<const BlockIdentity> blocks) const override;
  const EngineTotals& totals() const noexcept { return totals_; }
  void keep_times() override {
    token_log_.keep_gaps();
    if (tiers_) tiers_->keep_load_times();
    if (offload_links_) offload_links_->keep_load_times();
  }
  void take_gaps(GapSum& out) override { token_log_.take_gaps(out); }
  std::vector<EngineSample> samples() const override { return token_log_.samples(); }
  void describe_step(StepView& out) const override;

  // ── Events: with config().events, rows of both streams since the last call ──
  // On the device a row is visible at the end of its step (or at once, when none is open), on tiers below when it
  // happened.
  using Engine::take_events;
  void take_events(TimedEvents& out) override { announcer_.take_visible(out); }
  DrainedEvents take_all_events() { return announcer_.take_all(); }
  DrainedEvents peek_events() { return announcer_.peek_new(); }
  // With config().published_blocks.
  std::size_t published_prefix(std::span<const BlockIdentity> blocks, std::size_t known) override {
    return announcer_.published_prefix(blocks, known);
  }
  std::vector<TimedKvTrace> take_kv_trace() override { return kv_->take_trace(); }
  std::vector<BlockStay> take_stays() noexcept { return kv_->take_stays(); }
  // Accepted drafts by position, out of those verified.
  const std::vector<std::uint64_t>& accepted_at() const noexcept { return accepted_at_; }

  // Raises InvariantViolated when requests, blocks and (with config().check) events contradict each other. O(blocks).
  void check() override;
  StateDigest digest(bool with_cached) const override;

 private:
  static constexpr std::uint64_t kThrashing = 1 << 17;  // fruitless preemptions: far more than real progress has
  using Room = KvBackend::Room;

  // requests.cpp
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
  template <typename Load>
  void count_time(const Load& load, std::int64_t duration_ns) noexcept {
    totals_.step_ns += duration_ns;
    if (!timing_.model->covers(load)) totals_.uncovered_ns += duration_ns;
  }
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

  // prefixes.cpp
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
  std::uint32_t num_keyed(const EngineRequest& request) const {
    return grouped_ != nullptr ? grouped_->keyed_units(request) : request.keyed;
  }
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

  // handoff.cpp
  // setup.cpp
  std::unique_ptr<Connector> make_offloading();
  std::unique_ptr<Connector> make_nixl(const EngineSite& site);
  std::unique_ptr<Connector> make_connector(const EngineSite& site);
  void connect(const EngineSite& site);

  void require_leg(const RequestSpec& spec) const;
  void give_up_load(EngineRequest& request);
  bool only_polls(bool reported) const noexcept;
  void poll_idle(bool changed, std::int64_t now_ns);
  // Without tokens to compute vLLM's loop sleeps this long between two schedules.
  static constexpr std::int64_t kIdlePollNs = 1'000'000;
  std::int64_t poll_at(std::int64_t time_ns) const noexcept {  // the first schedule of that loop from `time_ns` on
    const std::int64_t late_ns = std::max<std::int64_t>(time_ns - clock_.now_ns, 0);
    return clock_.now_ns + (late_ns + kIdlePollNs - 1) / kIdlePollNs * kIdlePollNs;
  }
  std::int64_t next_poll_ns() const;
  bool rests() const noexcept { return idle() && !(polls_ && handoff_pending()); }  // nothing to do
  bool begins_in_order() const;
  bool may_fail_load() const noexcept;
  // No later than what has reached this worker, or what it must send.
  std::int64_t quiet_until(std::int64_t until_ns) const { return std::min(until_ns, connector_->next_event_ns()); }
  bool can_fast_forward_pulling() const;
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
  std::uint64_t check_offload() const;
  std::uint64_t kept_blocks() const;

  // step.cpp
  const StepLoad& open_load() const noexcept { return config_.async_scheduling ? open_.load : load_; }
  void sync_to(std::int64_t now_ns);
  void begin_one_step(std::int64_t now_ns);
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
  // Every running request decodes or waits for room, and no request can be admitted until one of them ends.
  bool can_fast_forward() const;
  bool can_fast_forward_ahead() const;
  bool can_fast_forward_offloading() const;
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
  bool live(const Scheduled& turn) const noexcept {
    return requests_[turn.slot].id == turn.id && requests_[turn.slot].status != RequestStatus::Finished;
  }
  std::uint32_t outputs_left(const EngineRequest& request) const noexcept {
    return std::min(request.spec.outputs() - request.outputs(), config_.max_model_len - request.known);
  }

  // finish_bound.cpp
  std::uint64_t steps_to_finish(const EngineRequest& request) const noexcept;
  std::optional<Outlook> outlook() const;
  bool has_room_for_all() const;
  std::int64_t finish_bound() const;

  // step_view.cpp
  StepEntry entry_of(const Scheduled& turn) const;
  AdmissionStop why_waiting() const;

  // watch.cpp
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
  std::uint64_t capacity_tokens_;
  std::uint64_t watermark_blocks_;
  BurstSampler bursts_;
  BurstSampler acceptance_;

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
  std::deque<KeptBlocks> deferred_frees_;
  std::unordered_map<RequestId, KeptBlocks> orphans_;  // requests aborted during their load
  KeptTables kept_;                                    // of requests that are still to be sent
  bool has_ended_ = false;

  // Parts of the connector; null: none.
  NixlConnector* nixl_ = nullptr;
  MultiConnector* multi_ = nullptr;
  KvSender* sender_ = nullptr;
  KvReceiver* receiver_ = nullptr;
  OffloadingConnector* offloading_ = nullptr;
  OffloadConnector* offload_ = nullptr;
  OffloadSteps* offload_steps_ = nullptr;
  OffloadLinks* offload_links_ = nullptr;

  // Hand-offs over the links of a run.
  HandOffNet* net_ = nullptr;  // null: none, or a driver of steps moves the blocks
  bool polling_ = false;       // the last schedule had nothing to compute; the next is at clock_.now_ns or later
  bool poll_due_ = false;      // and something has changed since

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

  // Time.
  StepClock clock_;
  std::optional<std::uint64_t> stuck_;                // free blocks when the engine got stuck
  mutable std::optional<std::int64_t> finish_bound_;  // no_finish_before, valid until something changes
  std::uint64_t fruitless_preemptions_ = 0;           // since the last token
  LandingWait landing_wait_;
  std::optional<std::uint64_t> released_before_;  // by tiers, when a schedule with groups only preempted
  std::uint64_t landings_noticed_ = 0;
  bool fast_forwards_ = true;
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
