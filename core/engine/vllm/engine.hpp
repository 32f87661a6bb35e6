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

#include "base/turn.hpp"
#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "engine/forward_pass.hpp"
#include "engine/kv_trace.hpp"
#include "engine/timing.hpp"
#include "engine/token_log.hpp"
#include "engine/vllm/burst_sampler.hpp"
#include "engine/vllm/live_request.hpp"
#include "engine/vllm/waiting_queue.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"
#include "store/block_store.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// What a request computes in a batch.
struct Scheduled {
  RequestSlot slot;
  std::uint32_t tokens;
  std::uint32_t before;  // computed until then
  bool samples;
  RequestId id;              // the slot may have gone to another since
  std::uint32_t drafts = 0;  // of the tokens, to be verified
  bool blank = false;        // none of the drafts can be right
};

// Scheduled together; run together.
struct Batch {
  static constexpr std::int64_t kUnknown = -1;

  std::vector<Scheduled> turns;
  StepLoad load;
  std::int64_t duration_ns = 0;  // or kUnknown, until somebody asks

  bool empty() const noexcept { return turns.empty(); }
};

// What the last step decided, in vLLM's order. Of two schedules (asynchronously, behind an empty queue) `scheduled` is
// that of the second.
struct StepLog {
  std::vector<Scheduled> scheduled;
  std::vector<RequestId> admitted;  // with `resumed` and `cached` of the same length
  std::vector<bool> resumed;
  std::vector<std::uint32_t> cached;
  std::vector<RequestId> preempted;
  std::vector<RequestId> finished;                       // that the scheduler learnt of since
  std::vector<std::pair<RequestId, std::string>> ended;  // and the names of these, and of those cancelled since
  std::uint64_t free_after_schedule = 0;

  void clear() noexcept {  // keeps the memory
    scheduled.clear();
    admitted.clear();
    resumed.clear();
    cached.clear();
    preempted.clear();
    finished.clear();
    ended.clear();
    free_after_schedule = 0;
  }
};

// Step-exact with the real scheduler of the configured version. Synchronously a step is begin_step (schedule; what it
// admits is visible at once) and end_step (its tokens are). Asynchronously there are two batches: when one begins, the
// next is scheduled behind it, so that who comes while batch s runs is first computed in batch s + 2.
class VllmEngine final : public Engine {
 public:
  // With `tiers`, blocks go down to them and come back; `run` is what its workers share (null: the engine is alone).
  VllmEngine(const EngineConfig& config, StepTiming timing, const TierConfig* tiers = nullptr, TierRun* run = nullptr,
             const std::string& name = "worker");

  const EngineConfig& config() const noexcept { return config_; }
  BlockStore& store() noexcept { return store_; }
  const BlockStore& store() const noexcept { return store_; }

  // ── Requests ──
  RequestId submit(RequestSpec spec) override;
  std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const override;
  std::optional<RequestRecord> cancel(RequestId id, std::int64_t now_ns) override;
  // One that has not ended; InvalidArgument when there is none.
  const EngineRequest& request(RequestId id) const;
  // Tokens that it will have emitted when it has run to its end.
  std::uint32_t expected_outputs(const EngineRequest& request) const noexcept {
    return std::min(request.spec.outputs(), config_.max_model_len - request.spec.prompt_tokens);
  }
  std::vector<RequestId> running() const;
  std::vector<RequestId> waiting(std::size_t count) const;  // the first so many
  std::size_t num_waiting() const noexcept { return waiting_.size(); }
  std::size_t num_slots() const noexcept { return requests_.size(); }  // as many were here at one time
  std::size_t steps_kept() const noexcept { return token_log_.steps_kept(); }
  std::int64_t room_wait_ns(RequestId id) const { return tiers_->waited_ns(slots_.at(id)); }
  bool idle() const noexcept override {
    return running_.empty() && waiting_.empty() && planned_.empty() && parked_ == 0;
  }
  std::size_t parked() const noexcept { return parked_; }  // requests whose blocks are being loaded
  WorkerTiers* tiers() noexcept override { return tiers_.get(); }
  const WorkerTiers* tiers() const noexcept override { return tiers_.get(); }
  void drain_transfers() override;
  // Loads the prefix that tiers below have, before anybody asks for it. True when something is on its way.
  bool prefetch(std::span<const BlockIdentity> blocks, std::int64_t now_ns);
  TierRun* own_run() noexcept { return own_run_.get(); }
  Turns& turns() noexcept { return tiers_ ? tiers_->turns() : turns_; }

  // ── Steps ──
  // InvalidArgument when transfers have come further than `now_ns`: they cannot be started in their past.
  void require_time(std::int64_t now_ns) const;
  std::int64_t begin_step(std::int64_t now_ns) override;
  const StepEffects& end_step(std::int64_t end_ns) override;
  // A step as recordings of the scheduler count them: a schedule, and the update that follows it. Asynchronously that
  // is of the batch before, so that no time passes in between. Not to be mixed with begin_step and end_step.
  void begin_turn(std::int64_t now_ns);
  const StepEffects& end_turn(std::int64_t now_ns);
  bool in_step() const noexcept override { return in_step_; }
  const StepLog& log() const noexcept { return log_; }
  // What the open step computes.
  const std::vector<Scheduled>& batch() const noexcept {
    return config_.async_scheduling ? open_.turns : log_.scheduled;
  }
  // The step that is open, and what waits. WrongState when none is.
  ForwardPass forward_pass() const;
  // Leaps over runs of plain decode steps.
  const StepEffects& advance(std::int64_t until_ns, bool stop_on_finish) override;
  const StepEffects& advance_lazily(std::int64_t until_ns) override;
  std::int64_t no_finish_before() const override;
  std::int64_t now_ns() const noexcept override { return now_ns_; }
  void skip_to(std::int64_t time_ns) noexcept override { now_ns_ = std::max(now_ns_, time_ns); }
  std::int64_t wake_ns() const override;
  void set_leaping(bool on) noexcept { leaping_ = on; }
  // Told of every step that is not leapt over, after it has begun (false) and after it has ended (true).
  using Observer = std::function<void(bool ended)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  void set_pause(std::function<void(const StepEffects&)> pause) override { pause_ = std::move(pause); }
  // Requests preempt each other without end when the oldest must give way: preemption_mode fifo, or equal priorities.
  bool stuck() const noexcept override { return stuck_; }
  Stall stall() const override;
  bool asleep() const noexcept override { return sleeping_; }
  bool landed(std::int64_t now_ns) override;

  // What the last call of end_step or advance returned, if nobody has taken it.
  StepEffects take_effects() { return std::exchange(effects_, {}); }

  EngineSnapshot snapshot() const override;
  const EngineTotals& totals() const noexcept { return totals_; }
  std::vector<GapCount> take_gaps() override { return token_log_.take_gaps(); }
  std::vector<EngineSample> samples() const override { return token_log_.samples(); }

  // ── Events: with config().events, rows of both streams since the last call ──
  // On the device a row is visible at the end of its step (or at once, when none is open), on tiers below when it
  // happened.
  TimedEvents take_events() override { return events_.take_visible(); }
  DrainedEvents drain_events();  // those of the step in progress too, as the store tells them
  DrainedEvents peek_events();   // the same, and they stay to be taken
  void set_on_events(std::function<void(std::int64_t)> on_events) override { on_events_ = std::move(on_events); }
  std::vector<TimedKvTrace> take_kv_trace() noexcept { return std::exchange(kv_trace_, {}); }

  // Raises InvariantViolated when requests, blocks and (with config().check) events contradict each other. O(blocks).
  void check() override;

 private:
  static constexpr std::uint64_t kThrashing = 1 << 17;  // fruitless preemptions: far more than real progress has

  struct Blocked {  // why the head of the queue could not be admitted, while that still holds
    bool valid = false;
    bool wants_key = false;
    LineageHash missing;         // the key that would lengthen its hit
    std::uint64_t released = 0;  // by the tiers until then
  };

  class Leap;
  struct Appointment {
    std::uint64_t step;
    std::uint32_t order;  // place in the running list when the leap began
    bool operator>(const Appointment& other) const { return std::tie(step, order) > std::tie(other.step, other.order); }
  };
  struct LeapScratch {
    std::vector<RequestSlot> members;
    std::vector<std::uint64_t> since;   // how many steps its request knows of
    std::vector<std::uint64_t> last;    // step of each
    std::vector<std::uint8_t> out;      // members that have ended, or wait for room
    std::vector<std::uint32_t> paused;  // those that wait
    std::vector<Appointment> turns;     // a heap, the next first
    std::vector<std::uint32_t> due;     // in the step at hand
    std::vector<std::uint32_t> done;    // of them, with it
    std::vector<Scheduled> filled;      // requests whose block is complete
  };

  // schedule.cpp
  std::int64_t schedule(std::int64_t now_ns);
  void schedule_running(std::int64_t now_ns);
  std::uint32_t next_tokens(const EngineRequest& request) const;
  std::uint32_t prefill_cap() const;
  std::size_t max_running() const noexcept { return std::min(config_.max_num_seqs, config_.max_num_active_seqs); }
  std::size_t choose_victim() const;
  void preempt(std::size_t position);
  void admit(std::int64_t now_ns);
  using Room = WorkerTiers::Room;
  Room grow(RequestSlot id, std::uint32_t total, std::int64_t now_ns);
  bool fits(EngineRequest& request, std::uint32_t tokens, std::size_t hits, std::size_t unreferenced);
  Room place(RequestSlot id, std::uint32_t tokens, std::size_t hits, std::int64_t now_ns);
  Room take_blocks(RequestSlot id, std::size_t count, std::int64_t now_ns);
  void key_blocks(EngineRequest& request, std::uint32_t total);
  void free_blocks(EngineRequest& request);
  void need_identities(EngineRequest& request, std::size_t blocks);
  void trace_taken(std::size_t taken, std::uint64_t evictions_before);
  std::uint32_t blocks_for(std::uint32_t tokens) const noexcept {
    return (tokens + config_.block_size - 1) / config_.block_size;
  }

  // kvbm.cpp
  std::uint32_t named_blocks(const EngineRequest& request) const noexcept;
  std::uint64_t cost_of_shared(EngineRequest& request, std::size_t count);
  Room take_shared(RequestSlot id, std::size_t count, std::int64_t now_ns);
  void seal_blocks(EngineRequest& request, std::uint32_t named);

  // tiers.cpp
  WorkerTiers::Onboard onboard(RequestSlot id, std::size_t hits, std::size_t limit, std::int64_t now_ns);
  void resume_loaded();
  void count_origins(RequestSlot id, std::size_t hits, bool resumed);
  void write_through(const std::vector<Scheduled>& turns, std::int64_t now_ns);
  void notice_landings(std::int64_t now_ns);
  bool roused() const noexcept { return disturbed_ || tiers_->has_ready() || tiers_->released() != released_at_sleep_; }
  bool head_may_move() const;
  bool leap_disturbed();
  bool leap_has_room(std::uint64_t slots) const;

  // engine.cpp
  void play(std::int64_t until_ns, bool stop_on_finish, bool lazily);
  void finish_step(std::int64_t end_ns);
  void new_effects();
  const StepEffects& hand_out();
  void close_step();
  void show_events(std::int64_t now_ns);
  void release_events(std::int64_t now_ns);
  void greet(std::int64_t now_ns);
  std::int64_t try_schedule(std::int64_t now_ns);
  bool found_work(std::int64_t now_ns);
  void open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns);
  void receive(const std::vector<Scheduled>& turns, std::int64_t end_ns);
  bool receive_token(const Scheduled& turn, std::uint64_t step);
  bool live(const Scheduled& turn) const noexcept {
    return requests_[turn.slot].id == turn.id && requests_[turn.slot].status != RequestStatus::Finished;
  }
  void retire(EngineRequest& request);
  void complete(RequestSlot slot, std::int64_t now_ns);
  RequestRecord take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns);
  void fold_token_log();
  void somebody_came_or_went();
  bool thrashing() const noexcept { return fruitless_preemptions_ > kThrashing; }
  StepLoad measure() const;
  void undo_schedule();

  // burst.cpp
  std::uint32_t burst_room(const EngineRequest& request, std::uint32_t total) const noexcept;
  std::uint32_t lookahead(std::uint32_t total, bool admission) const noexcept;
  bool can_add() const noexcept { return budget_ > 0 && input_budget_ > config_.speculation.draft_slots; }
  void charge(std::uint32_t tokens) noexcept;
  void receive_drafts(EngineRequest& request, const Scheduled& turn);
  void receive_burst(EngineRequest& request);

  // leap.cpp
  bool can_leap() const;
  bool can_leap_ahead() const;
  bool decodes(RequestSlot id) const noexcept;
  bool leap(std::int64_t until_ns, bool stop_on_finish);
  std::uint32_t outputs_left(const EngineRequest& request) const noexcept;

  // forecast.cpp
  std::uint64_t steps_to_finish(const EngineRequest& request) const noexcept;
  bool decodes_undisturbed(std::uint64_t steps) const;
  std::int64_t plain_step_ns() const;

  // watch.cpp
  void sample(std::size_t running);
  void check_counts(bool whole) const;

  EngineConfig config_;
  Turns turns_;
  StepTiming timing_;
  BlockStore store_;
  const bool shared_;  // the kvbm manager
  const bool emits_;   // the store tells what happens
  std::unique_ptr<TierRun> own_run_;
  std::unique_ptr<WorkerTiers> tiers_;
  std::uint64_t capacity_tokens_;
  std::uint64_t watermark_blocks_;
  BurstSampler bursts_;
  BurstSampler acceptance_;

  std::vector<EngineRequest> requests_;  // by slot
  std::vector<RequestSlot> free_slots_;
  std::unordered_map<RequestId, RequestSlot> slots_;  // of those who have not ended
  RequestId next_id_ = 0;
  std::vector<RequestSlot> running_;
  WaitingQueue waiting_;
  std::uint64_t budget_ = 0;
  std::uint64_t input_budget_ = 0;  // less than the budget where a draft model takes slots of its own
  std::uint32_t prefill_cap_ = EngineConfig::kUnlimited;  // in the schedule at hand
  StepLog log_;
  StepLoad load_;              // of the last schedule
  Batch open_;                 // asynchronously: what the open step computes
  Batch planned_;              // and what comes behind it
  std::int64_t begun_ns_ = 0;  // when the last step began
  std::int64_t now_ns_ = 0;
  bool in_step_ = false;
  bool stuck_ = false;
  bool sleeping_ = false;
  bool disturbed_ = false;  // a request came or went while it slept
  std::uint64_t released_at_sleep_ = 0;
  std::uint64_t landings_noticed_ = 0;
  std::int64_t leap_taken_ns_ = -1;  // a leap has begun the step of then (blocks are taken), and not played it
  std::size_t parked_ = 0;
  std::uint64_t fruitless_preemptions_ = 0;  // since the last token
  bool leaping_ = true;
  Observer observer_;
  std::function<void(const StepEffects&)> pause_;
  Blocked blocked_;
  std::vector<SlotId> hits_;  // scratch, and so are the next three
  std::vector<SlotId> peeked_;
  std::vector<std::uint32_t> holders_;
  std::vector<SlotId> fresh_;
  LeapScratch leap_;
  std::vector<std::uint8_t> phantom_;  // slots keyed by an allocation that was undone; empty before the first
  StepEffects effects_;
  bool handed_out_ = false;
  EngineTotals totals_;
  TokenLog token_log_;
  EngineEventLog events_;
  std::function<void(std::int64_t)> on_events_;
  bool step_holds_events_ = false;  // rows of the device are those of a step that has not ended
  EventTruth truth_;
  std::vector<TimedKvTrace> kv_trace_;
};

}  // namespace understudy
