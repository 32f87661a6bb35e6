// vLLM's scheduler: which requests compute how many tokens in the next step, and what its output changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/engine.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/admission.hpp"
#include "engine/vllm/batch.hpp"
#include "engine/vllm/burst_sampler.hpp"
#include "engine/vllm/config.hpp"
#include "engine/vllm/connector/connector.hpp"
#include "engine/vllm/held_prefixes.hpp"
#include "engine/vllm/kv_backend.hpp"
#include "engine/vllm/left_blocks.hpp"
#include "engine/vllm/live_request.hpp"
#include "engine/vllm/onboarding.hpp"
#include "engine/vllm/prefill_interval.hpp"
#include "engine/vllm/scheduler_state.hpp"
#include "engine/vllm/waiting_queues.hpp"

namespace understudy {

class GroupedBackend;

// Parts of an engine that its scheduler uses; they outlive it.
struct SchedulerParts {
  const VllmConfig& config;
  KvBackend& kv;
  GroupedBackend* grouped;  // the same, with several KV cache groups; else null
  WorkerTiers* tiers;       // null: none
  Connector& connector;
  Onboarding& onboarding;  // of blocks in lower tiers
  Batch& planned;          // asynchronously: the batch behind the open one
  TokenLog& token_log;
  // Results.
  Effects& effects;
  EngineTotals& totals;
};

// Calls are those of vLLM's Scheduler (v1/core/sched/scheduler.py), in its order: `schedule`, `update_after_schedule`
// and, when the batch has been computed, `update_from_output`. It knows no clock and no times of steps. A schedule is a
// decision: it counts from `update_after_schedule` on, and until then it can be suspended and continued.
class Scheduler {
 public:
  explicit Scheduler(const SchedulerParts& parts);

  // ── Requests ──
  EngineRequest& add_request(RequestSpec spec);
  // The request ends before its last token.
  void finish_request(RequestSlot slot, FinishReason reason, std::int64_t now_ns);
  const EngineRequest& request(RequestId id) const;  // that has not ended; else InvalidArgument
  void set_admitting(bool on) noexcept { admitting_ = on; }
  bool is_admitting() const noexcept { return admitting_; }
  // No request holds blocks.
  bool drained() const;
  // With reset_connector, as in vLLM. False: blocks are in use, or the connector cannot.
  bool reset_prefix_cache();
  HeldPrefixes& held() noexcept { return held_; }  // of sessions that sleep
  RequestSlot spare_slot();                        // of no request

  // ── A schedule ──
  // Decide on a batch: `log().scheduled`. What a user-defined policy raises goes through; the caller then suspends.
  void schedule(std::int64_t now_ns);
  // The schedule, or the timing of its batch, raised. Nothing of it is computed: its names are withdrawn. Admitted
  // requests keep their blocks. A schedule at the same time continues it.
  void suspend(std::int64_t now_ns);
  bool continues_at(std::int64_t now_ns) const noexcept { return suspended_ && suspended_->now_ns == now_ns; }
  bool is_suspended() const noexcept { return suspended_.has_value(); }
  void forget_suspended() noexcept { suspended_.reset(); }
  // The decision counts (vLLM: _update_after_schedule): its tokens are as good as computed, and the connector gives its
  // orders.
  void update_after_schedule(std::int64_t now_ns);
  bool has_budget() const noexcept { return budget_ > 0 && input_budget_ > config_.speculation.draft_slots; }
  bool has_preempted() const noexcept { return log_.preempted.size() > preempted_before_; }
  StepLog& log() noexcept { return log_; }
  ConnectorOrders& orders() noexcept { return orders_; }  // for the batch of the last schedule

  // ── Its output ──
  // Receive the tokens of a batch, in its order; a request with its last token is freed at once.
  void update_from_output(const std::vector<Scheduled>& turns, std::int64_t end_ns);
  // Read what the worker's half of the connector has reported. True: a request has failed.
  bool update_from_kv_xfer_finished(const ConnectorOutput& output, std::int64_t now_ns);
  void finish(RequestSlot slot, std::int64_t end_ns);  // a running request that has its last token
  void resume_loaded();                                // parked requests whose blocks have come return to the queues
  void fold_token_log();
  void note_progress() noexcept { counts_.fruitless_preemptions = 0; }

  // ── State ──
  const std::vector<EngineRequest>& requests() const noexcept { return requests_; }  // by slot
  const std::unordered_map<RequestId, RequestSlot>& slots() const noexcept { return slots_; }
  const std::vector<RequestSlot>& running() const noexcept { return running_; }
  const WaitingQueues& waiting() const noexcept { return waiting_; }
  const LeftBlocks& left() const noexcept { return left_; }
  const SchedulerCounts& counts() const noexcept { return counts_; }
  const std::vector<std::uint64_t>& accepted_at() const noexcept { return accepted_at_; }  // drafts, by position
  Refusal& refusal() noexcept { return refusal_; }
  PrefillInterval& interval() noexcept { return interval_; }
  // Whether blocks freed since the last attempt may admit the head of the queue; and whether it stays there while other
  // requests take blocks.
  bool head_may_move() const;
  bool head_stays() const;
  // Whether the request of an entry has not ended.
  bool live(const Scheduled& turn) const noexcept {
    return requests_[turn.slot].id == turn.id && requests_[turn.slot].status != RequestStatus::Finished;
  }
  std::size_t max_running() const noexcept { return std::min(config_.max_num_seqs, config_.max_num_active_seqs); }
  void check() const;  // InvariantViolated when a request is not in exactly one place
  // The state that a fast-forward changes in place of a schedule.
  Decoding decoding() noexcept { return {requests_, running_, waiting_, refusal_, steps_}; }

 private:
  using Room = KvBackend::Room;

  // The current schedule, suspended.
  struct Suspended {
    std::int64_t now_ns;
    StepLog log;
  };

  // schedule.cpp
  void begin_schedule();
  void continue_schedule(std::int64_t now_ns);
  void schedule_running(std::int64_t now_ns);
  bool defers(RequestSlot slot) const;
  Room allocate_slots(EngineRequest& request, std::uint32_t end, std::int64_t now_ns);
  std::uint32_t num_new_tokens(const EngineRequest& request) const;
  std::uint32_t prefill_cap() const;
  std::size_t choose_victim() const;
  void preempt_request(std::size_t position, RequestId by, std::int64_t now_ns);
  bool unschedule(StepLog& log, RequestSlot slot);
  void drop_in_flight(const EngineRequest& victim);
  void charge(std::uint32_t tokens) noexcept;
  void build_connector_meta(std::int64_t now_ns);
  void release_copies();

  // admit.cpp
  void admit(std::int64_t now_ns);
  void schedule_waiting(std::int64_t now_ns);
  bool try_promote(EngineRequest& request, std::int64_t now_ns);
  void note_adapters();
  void note_adapter(const EngineRequest& request);
  bool lacks_adapter(const EngineRequest& request) const;
  bool only_decodes() const;
  Admission get_computed_blocks(EngineRequest& request, std::int64_t now_ns);
  // More than the token that is sampled from.
  bool computes_prompt(const Admission& head) const { return head.hit_tokens + 1 < requests_[head.slot].known; }
  bool size_up(Admission& head, bool decodes_only, bool joins) const;
  Room allocate_slots(const Admission& head, std::int64_t now_ns);
  void enter(const Admission& head, std::int64_t now_ns);
  std::uint32_t room_up_to(const EngineRequest& request, std::uint32_t total, bool admission) const noexcept;

  // refusal.cpp
  bool fits(const Admission& head);
  bool fits_new(const Admission& head);
  bool fits_behind(const Admission& head) const;
  void refuse(const Admission& head);
  void refuse_room();
  bool waits_for_copies(const EngineRequest& request);
  bool head_lacks_room() const;
  bool yield_hold(std::int64_t now_ns);

  // loads.cpp
  enum class Load : std::uint8_t { None, Begun, NoRoom };
  Load load_from_connector(Admission& head, std::int64_t now_ns);
  Load load_from_tiers(Admission& head, std::int64_t now_ns);
  std::optional<std::uint32_t> get_num_new_matched_tokens(Admission& head, std::int64_t now_ns);
  std::optional<std::uint32_t> match_groups(Admission& head, std::int64_t now_ns);
  Admission loaded_head(EngineRequest& request, std::int64_t now_ns);
  bool place_load(const Admission& head, std::uint32_t tokens, std::int64_t now_ns);
  void begin_load(EngineRequest& request, std::uint32_t local, std::uint32_t tokens, std::int64_t now_ns);
  std::uint64_t lacking() const;
  void update_waiting_for_remote_kv(EngineRequest& request, std::int64_t now_ns);
  void give_up_load(EngineRequest& request);
  void park(EngineRequest& request);
  void count_hits(const Admission& head, bool resumed);
  void count_loaded(EngineRequest& request, bool resumed);
  void count_origins(const Admission& head, bool resumed);

  // free.cpp
  void free_request(EngineRequest& request, bool aborted, std::int64_t now_ns);
  void leave_running(RequestSlot slot);
  void leave_blocks(EngineRequest& request, bool aborted, std::int64_t now_ns);
  void free_blocks(EngineRequest& request);
  void free_deferred();
  bool freeable(std::uint64_t last_step) const noexcept { return !fenced_ || last_step <= steps_.processed; }
  RequestRecord take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns);

  // update.cpp
  bool receive_token(const Scheduled& turn, std::uint64_t step);
  bool may_name_for_head(EngineRequest& request, std::uint32_t computed);
  void receive_drafts(EngineRequest& request, const Scheduled& turn);
  void receive_burst(EngineRequest& request);
  std::uint32_t outputs_left(const EngineRequest& request) const noexcept {
    return std::min(request.spec.outputs() - request.outputs(), config_.max_model_len - request.known);
  }

  // Parts.
  const VllmConfig& config_;
  KvBackend& kv_;
  GroupedBackend* const grouped_;
  WorkerTiers* const tiers_;
  Connector& connector_;
  Onboarding& onboarding_;
  Batch& planned_;
  TokenLog& token_log_;
  Effects& effects_;
  EngineTotals& totals_;

  // Settings.
  const std::uint64_t watermark_blocks_;
  const std::uint32_t lookup_unit_;  // tokens: lookups end at a multiple of it
  const bool connects_;              // schedules are reported to a connector
  const bool loads_;                 // prompts may come from elsewhere
  const bool recomputes_;            // a request whose load failed; else it fails
  const bool fenced_;                // blocks are not freed while a step in flight may write them
  const bool spares_in_flight_;      // requests with an output in flight are not preempted

  // Requests.
  std::vector<EngineRequest> requests_;  // by slot
  std::vector<RequestSlot> free_slots_;
  std::unordered_map<RequestId, RequestSlot> slots_;  // requests that have not ended
  std::vector<RequestSlot> running_;
  std::vector<RequestSlot> prefills_in_flight_;  // prompts that are being loaded or computed in part
  WaitingQueues waiting_;
  bool admitting_ = true;
  SchedulerCounts counts_;
  HeldPrefixes held_;
  LeftBlocks left_;

  // The current schedule, and the last one.
  std::uint64_t budget_ = 0;        // vLLM: token_budget
  std::uint64_t input_budget_ = 0;  // less than the budget where a draft model takes slots
  std::uint32_t prefill_cap_ = VllmConfig::kUnlimited;
  std::size_t cursor_ = 0;            // the next of the running list
  bool running_is_done_ = false;      // the running list
  std::size_t preempted_before_ = 0;  // in the log
  std::size_t admitted_before_ = 0;   // the same
  PrefillInterval interval_;
  std::vector<std::uint32_t> adapters_;  // in the batch
  StepLog log_;
  Refusal refusal_;
  ConnectorOrders orders_;
  std::optional<Suspended> suspended_;
  StepCounts steps_;

  // Tokens.
  BurstSampler bursts_, acceptance_;
  std::vector<std::uint64_t> accepted_at_;  // size: most drafts of a round
};

}  // namespace understudy
