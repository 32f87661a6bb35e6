// A run: a workload, pools of simulated workers, a router, and one deterministic order of everything that happens.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "engine/sglang/push_net.hpp"
#include "replay/event_queue.hpp"
#include "replay/faults.hpp"
#include "replay/fleet_config.hpp"
#include "replay/fleet_result.hpp"
#include "replay/lives.hpp"
#include "replay/play_states.hpp"
#include "replay/run_columns.hpp"
#include "replay/session_keeper.hpp"
#include "replay/workload_columns.hpp"
#include "router/router.hpp"
#include "router/staged.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// How a run advances its workers. The result is the same; the cost is not.
enum class RunMode : std::uint8_t {
  Independent,  // one worker after another, or in threads: no worker's requests depend on another worker
  Lookahead,    // each worker up to the earliest time at which it can finish a request
  Stepwise,     // every step is an event
};

struct RunModeChoice {
  RunMode mode = RunMode::Stepwise;
  const char* reason = "";
};

class Fleet final : private FleetView {
 public:
  // Called now and then, on the thread that runs the fleet, with the number of ended requests; may throw to stop the
  // run.
  using Progress = std::function<void(std::size_t)>;

  Fleet(FleetConfig config, WorkloadColumns workload);

  const RunModeChoice& mode() const noexcept { return mode_; }
  FleetResult run(const Progress& progress);

 private:
  static constexpr std::size_t kReportEvery = 256;  // requests between two calls of the progress hook
  static constexpr auto kReportAfter = std::chrono::milliseconds(50);  // or this

  struct Pool {
    WorkerPool config;
    std::shared_ptr<const EngineConfig> engine;  // with the settings of the run
    std::unique_ptr<TierRun> tiers;              // shared by its workers; null when each has its own
    std::vector<EventTable> shared_events;       // events of those tiers published so far, if kept
    std::size_t first_worker = 0;
  };
  struct Worker {
    std::unique_ptr<Engine> engine;  // the first worker of a group of ranks owns the engine of all
    WorkerInfo info;
    WorkerState state = WorkerState::Ready;
    std::uint64_t first_row = kNoRow;  // its first request
    Phase phase = Phase::Idle;         // phase of its engine after the last call
    std::int64_t wake_ns = Engine::kNever;
    EventQueue::Handle next = EventQueue::kNone;  // its entry among step ends
    bool begins = false;                          // has an entry among beginnings
    std::uint64_t ready_round = 0;                // the last round of beginnings that it was too late for
    std::int64_t finish_bound_ns = 0;             // with `check`: no request finishes earlier
    std::vector<RequestRecord> finished;          // not recorded yet
    EventTable events;                            // published so far, if kept
    std::vector<TimedKvTrace> kv_trace;           // of an engine that has stopped
    bool harvested = false;                       // its results are among the columns
    bool sleeps = false;                          // is among the sleepers, maybe woken since
  };
  static constexpr std::uint64_t kNoRow = ~std::uint64_t{0};

  RunModeChoice choose_mode() const;
  bool independent() const;
  bool has_user_policies() const;
  bool has_tiers() const;
  bool shares_tiers() const;
  bool has_free_prompts() const;
  bool can_show_blocks() const;
  WorkerId add_worker(std::uint32_t pool, WorkerState state);
  void set_state(WorkerId worker, WorkerState state);
  void make_engine(std::size_t index);
  EngineSite site_of(std::size_t index);
  bool reports_steps() const { return config_.on_step || config_.steps; }
  bool stepwise() const noexcept { return mode_.mode == RunMode::Stepwise; }
  const EngineConfig& config_of(std::size_t worker) const { return *pools_[workers_[worker].info.pool].engine; }
  // Ranks step together: the first worker of a group represents all of them in the queue.
  std::size_t lead(std::size_t worker) const noexcept { return worker - worker % config_.ranks; }
  bool steps_with_others() const noexcept { return config_.ranks > 1; }
  Engine& engine_of(std::size_t worker) { return *workers_[lead(worker)].engine; }
  Engine& rank_of(std::size_t worker) { return engine_of(worker).rank(worker - lead(worker)); }

  // fleet_alone.cpp: workers that never meet
  void run_independent(unsigned threads, const Progress& progress);
  void play_in_threads(unsigned threads, const std::vector<std::vector<std::uint64_t>>& rows, const Progress& progress);
  void play_alone(std::size_t index, const std::vector<std::uint64_t>& rows, const Progress& progress);

  // fleet_together.cpp: workers that affect each other, in the order of the queue
  void run_together(const Progress& progress);
  void open_arrivals();
  void push_next_arrival();
  void push_arrival(std::int64_t time_ns, std::uint64_t row);
  void arrive(std::uint64_t row);
  bool arrive_first(std::uint64_t row);
  void place(std::uint64_t row, std::size_t worker, KvLeg leg = KvLeg::Whole);
  void release_queued();
  void absorb(std::size_t worker, const Effects& effects);
  void record_finished(std::size_t worker);
  void end_turn(std::uint64_t row, std::int64_t time_ns);

  // fleet_plays.cpp: requests that wait for others
  void open_plays();
  void open_profile(std::int64_t time_ns);
  void start_play(std::int64_t time_ns);
  void start_next_play(std::int64_t time_ns);
  bool comes_too_late(std::uint64_t row) const;
  void cancel_rest();
  void cap_idle_time(std::size_t play);
  void bring_forward(std::optional<std::size_t> play, std::int64_t by_ns);
  void push_released(std::span<const PlayStates::Released> released);
  void mark_arrival(std::uint64_t row);
  void end_in_play(std::uint64_t row, std::int64_t time_ns);

  // fleet_sessions.cpp: KV of sessions between their requests
  void open_sessions();
  void wake_session(std::uint64_t row);
  void put_to_sleep(std::uint64_t row);
  void ask_session(std::uint64_t id);
  void keep_prefix(std::uint64_t id, PrefixAction action);
  std::optional<std::uint64_t> parent_of(std::uint64_t session) const;
  std::optional<std::int64_t> told_gap_ns(std::uint64_t row);

  std::uint64_t order_of(std::size_t worker) const;
  std::uint64_t order_of_group(std::size_t lead) const;
  void want_begin(std::size_t worker);
  void push_step_end(std::size_t worker);
  void cancel_entry(EventQueue::Handle& handle);
  void sync_worker(std::size_t worker);
  void after_input(std::size_t worker);
  void begin_all();

  // fleet_staged.cpp: prefill and decode pools
  static FleetConfig with_stages(FleetConfig config);
  void set_up_stages();
  std::optional<std::string> why_no_stage(std::uint64_t row) const;
  void arrive_staged(std::uint64_t row);
  void arrive_for_decode(std::uint64_t row);
  void end_prefill(const RequestRecord& record);
  void join_legs(RequestRecord& record);
  RouteRequest request_of(std::uint64_t row, RequestStage stage);
  WorkerId choose(std::uint64_t row, RequestStage stage);
  std::uint32_t cached_tokens(std::uint64_t row, WorkerId worker);
  void reach_workers();
  void collect_handoffs();

  // fleet_pushed.cpp: pools whose prefill workers push KV, as SGLang's
  void set_up_pushes();
  void arrive_pushed(std::uint64_t row);
  void abort_pushed(std::uint64_t row);
  void track_legs(std::size_t worker, const Effects& effects);
  void record_legs(std::size_t worker);
  void end_leg(std::size_t worker, const RequestRecord& record);
  RequestStage stage_of(std::size_t worker) const;

  // fleet_aborts.cpp: clients that abort their requests
  bool has_aborts() const;
  void push_abort(std::uint64_t row);
  void abort(std::uint64_t row);
  void drop_between_workers(std::uint64_t row);
  void end_aborted(std::uint64_t row);

  // fleet_steps.cpp: step by step (RunMode::Stepwise)
  void land_transfers();
  void end_step(std::size_t worker);
  void begin_step(std::size_t worker);
  void wake_after_instant_landings();
  void join_sleepers(std::size_t worker);
  void leave_sleepers(std::size_t worker);

  // fleet_lookahead.cpp: each worker as far as nothing can reach it (RunMode::Lookahead)
  void advance_to_now(std::size_t worker);
  void poll(std::size_t worker);
  void schedule_poll(std::size_t worker);
  [[noreturn]] void throw_first_stuck();

  // fleet_events.cpp: events and blocks for a router
  bool bring_router_up_to_date();
  bool gather_events();
  bool publish(std::size_t publisher, std::uint32_t pool, std::uint64_t owner, EventTable& kept);
  bool send(std::size_t publisher, std::uint32_t pool, std::uint64_t owner);
  void deliver_events(std::size_t index);
  void publish_step(std::size_t worker);
  void check_index(std::size_t worker);

  // FleetView
  std::int64_t now_ns() const override { return now_ns_; }
  std::span<const WorkerId> ready() const override { return ready_[static_cast<std::size_t>(stage_)]; }
  std::span<const WorkerLoad> loads() const override { return loads_; }
  const WorkerInfo& info(WorkerId worker) const override { return workers_.at(worker).info; }
  WorkerState state(WorkerId worker) const override { return workers_.at(worker).state; }
  WorkerCounts counts(WorkerId worker) override;
  bool held(std::span<const BlockIdentity> prompt, std::vector<std::uint32_t>& out) override;

  void report(const Progress& progress);
  std::uint64_t session_of(std::uint64_t row) const { return session_.empty() ? row : session_[row]; }
  std::optional<std::size_t> route(std::uint64_t row);
  std::optional<std::string> why_not(std::uint64_t row, const Pool& pool) const;
  bool fits(std::uint64_t row, std::size_t worker);
  void reject(std::uint64_t row, const std::string& why);
  std::shared_ptr<const IdentitySource> identities_of(std::uint64_t row, const EngineConfig& engine) const;
  std::shared_ptr<const IdentitySource> identities_of_leg(std::uint64_t row, const EngineConfig& engine);
  const Effects& submit(std::size_t worker, std::uint64_t row, std::int64_t arrival_ns, KvLeg leg = KvLeg::Whole);
  // Prompt and output that a router counts for a row on its worker.
  std::uint64_t tokens_of(std::uint64_t row, std::size_t worker) const {
    if (pushes_) {
      const bool decodes = stage_of(worker) == RequestStage::Decode;
      return static_cast<std::uint64_t>(workload_.prompt_tokens[row]) +
             (decodes ? static_cast<std::uint64_t>(workload_.output_tokens[row]) : 1);
    }
    const bool prompt_only = !prefilling_.empty() && prefilling_[row];
    return static_cast<std::uint64_t>(workload_.prompt_tokens[row]) +
           (prompt_only ? 1 : static_cast<std::uint64_t>(workload_.output_tokens[row]));
  }
  void require_progress(std::size_t worker);

  // fleet_lives.cpp: workers that join and leave
  void check_elastic() const;
  void open_lives();
  void enter(std::size_t worker, LifeState state);
  void tick();
  FleetMetrics measure();
  void measure_step(std::size_t worker, WorkerMetrics& out);
  void count_traffic(std::uint64_t row);
  bool scale(std::uint32_t pool, std::uint32_t target);
  void start_worker(std::uint32_t pool);
  void become_ready(std::size_t worker);
  void leave(std::size_t worker);
  void stop_drained();
  bool has_drained(std::size_t worker);
  void stop_worker(std::size_t worker);
  bool is_present(std::size_t worker) const;
  Engine& asked_engine(const Pool& pool) const;
  bool strand(std::uint64_t row, RequestStage stage);
  void require_none_stranded() const;
  [[noreturn]] void throw_stranded() const;

  // fleet_faults.cpp: what fails, and recovers
  void check_faults() const;
  void open_faults();
  void begin_fault(std::size_t number);
  void end_fault(std::size_t number);
  bool hits(const Fault& fault, std::size_t worker) const;
  void apply_faults(std::size_t worker);
  bool crash(std::size_t worker, std::size_t number);
  void wreck(std::size_t worker);
  void clear_wrecks(bool at_end);
  void disturb_router(const Fault& fault, bool begins);
  void send_rows(std::size_t worker, EventRecords rows);

  // fleet_losses.cpp: requests that lose their worker
  void hand_back(std::size_t worker);
  std::vector<LostRequest> take_requests(std::size_t worker);
  void lose(LostRequest lost, std::size_t worker, std::int32_t fault);
  Survival outcome_of(std::uint64_t row, std::uint32_t tokens);
  void carry(LostRequest lost);
  void join_attempts(RequestRecord& record);
  void fail_stranded();
  std::uint32_t carried_tokens(std::uint64_t row) const;
  std::uint32_t prompt_of(std::uint64_t row) const {  // tokens that its worker gets
    return static_cast<std::uint32_t>(workload_.prompt_tokens[row]) + carried_tokens(row);
  }
  std::uint32_t output_of(std::uint64_t row) const {  // tokens that its worker is to make
    return std::min(workload_.limit(row), static_cast<std::uint32_t>(workload_.output_tokens[row])) -
           carried_tokens(row);
  }

  // fleet_columns.cpp
  void prepare_columns();
  void collect(std::size_t worker);  // for a finished worker
  void harvest(std::size_t worker);
  static void add_kv_trace(Worker& worker, Engine& engine);
  void keep(const RequestRecord& record);
  void keep_events(std::size_t worker, TimedEvents& room);  // events published since the last call
  FleetResult finish_columns();

  FleetConfig config_;
  WorkloadColumns workload_;
  TransferHub hub_;  // for tiers that workers share
  std::vector<Pool> pools_;
  std::vector<Worker> workers_;    // by id
  std::vector<WorkerLoad> loads_;  // by id
  // Ids of the workers that may be chosen, by RequestStage.
  std::array<std::vector<WorkerId>, 3> ready_;
  RequestStage stage_ = RequestStage::Whole;  // of the request that is being routed
  bool shows_blocks_ = false;                 // the router reads the workers' cached blocks
  bool observes_ = false;                     // or it receives their events
  bool tracks_ = false;                       // and receives first tokens and completions
  std::vector<bool> started_;                 // rows with a first token, if the router tracks them
  std::vector<std::uint64_t> session_;        // session of each row; empty: one per row
  bool keeps_events_ = false;                 // in the result
  RunModeChoice mode_;

  EventQueue queue_;
  std::int64_t now_ns_ = 0;
  std::vector<std::uint64_t> first_turns_;  // in the order of their arrival, or of their places (closed loop)
  std::size_t next_first_turn_ = 0;
  std::optional<PlayStates> plays_;          // with a graph
  std::vector<std::size_t> play_order_;      // plays in the order of their starts
  std::size_t next_play_ = 0;                // place in that order
  PlayClock play_clock_;                     // of plays that end at a time, or whose idle time is capped
  std::unique_ptr<SessionKeeper> sessions_;  // null: no policy
  std::vector<std::size_t> sleepers_;
  std::vector<std::size_t> beginning_;
  std::uint64_t round_ = 1;  // round of beginnings; there may be several at one time
  std::int64_t round_ns_ = -1;
  std::uint64_t rounds_before_ = 1;     // before the first of this time
  std::vector<KvDelivery> deliveries_;  // events not delivered yet
  std::vector<std::size_t> free_deliveries_;
  std::int64_t up_to_date_ns_ = -1;     // when the router was last brought up to date
  std::uint64_t up_to_date_round_ = 0;  // and after which round of beginnings
  TimedEvents gathered_;                // memory of the call in progress

  // Blocks of the last prompt that each worker has: prompts that arrive together mostly begin alike.
  struct {
    std::int64_t time_ns = -1;  // and after which beginnings
    std::uint64_t round = 0;
    std::vector<LineageHash> prompt;
    std::vector<std::uint32_t> blocks;  // by worker
  } shown_;
  // Identities of the row that was routed last, so that its worker need not compute them again.
  struct {
    std::uint64_t row = 0;
    std::uint32_t block_size = 0;  // 0: none
    std::shared_ptr<const IdentitySource> identities;
  } routed_;
  // With prefill and decode pools; else empty.
  std::unique_ptr<HandOffNet> net_;
  // Where they push KV: a request is on two workers at a time. Else null.
  struct Legs {
    std::optional<RequestRecord> prefill;
    std::optional<RequestRecord> decode;
  };
  std::unique_ptr<PushNet> pushes_;
  StagedRouter* staged_ = nullptr;
  std::unordered_map<std::uint64_t, Legs> legs_;  // by row, until both have ended
  std::vector<RequestWay> way_;
  std::vector<bool> prefilling_;                                // on a prefill worker, or on its way from there
  std::vector<std::int32_t> decode_worker_;                     // -1: not chosen yet
  std::unordered_map<std::uint64_t, RequestRecord> prefilled_;  // by row, until it is decoded
  std::unordered_map<std::uint64_t, std::shared_ptr<const IdentitySource>>
      prefill_identities_;  // by row, until it is decoded
  RouteRequest asked_;      // the last one that a router was asked for

  std::unique_ptr<Lives> lives_;          // null: the workers stay the same
  std::vector<bool> aborted_;             // by row; empty if no client aborts
  std::vector<std::int64_t> arrival_ns_;  // actual arrival of each row; -1 if never
  std::vector<std::int32_t> worker_of_;
  std::vector<std::pair<std::int64_t, std::string>> rejections_;
  RunColumns columns_;
  std::atomic<std::size_t> ended_ = 0;
  std::atomic<bool> stop_ = false;
  std::size_t reported_ = 0;
  std::chrono::steady_clock::time_point reported_at_ = std::chrono::steady_clock::now();
};

}  // namespace understudy
