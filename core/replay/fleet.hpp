// A run: a workload, pools of simulated workers, a router, and one deterministic order of everything that happens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "engine/timing.hpp"
#include "replay/event_queue.hpp"
#include "replay/fleet_result.hpp"
#include "replay/run_columns.hpp"
#include "replay/workload_columns.hpp"
#include "router/router.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// Workers that are alike.
struct WorkerPool {
  std::string name;  // of its tiers and links, where there are several; two have not the same
  EngineConfig engine;
  StepTiming timing;
  std::optional<TierConfig> tiers;
  std::uint32_t num_workers = 1;
};

struct FleetConfig {
  std::vector<WorkerPool> pools;  // workers are numbered through them
  std::shared_ptr<Router> router;
  std::uint32_t concurrency = 0;   // sessions at a time; 0: open loop
  std::int64_t turnaround_ns = 0;  // from the end of a session to the start of the one that takes its place
  unsigned threads = 1;            // above 1: of workers that never meet
  bool leaping = true;
  bool route_rejected = false;  // a router is asked about what fits nowhere, too, as in Dynamo's replay
  bool check = false;           // verify conservation and the truth of events after every step
  // Above 0: every worker takes a step of this length after another, busy or not, until all requests have ended.
  std::int64_t lockstep_ns = 0;
  // Workers are data-parallel ranks of one model: they step together, and as long as the slowest of them.
  bool ranks = false;
  // Told of every step in the order of time, after it has begun and after it has ended. Turns leaping off.
  std::function<void(std::size_t worker, Engine& engine, bool ended)> on_step;
};

class Fleet final : private FleetView {
 public:
  // Called now and then, on the thread that runs the fleet, with the number of requests that have ended; may throw to
  // stop the run.
  using Progress = std::function<void(std::size_t)>;

  Fleet(FleetConfig config, WorkloadColumns workload);

  // Whether every worker's requests are known beforehand, so that workers can be played one by one, or in threads.
  bool independent() const noexcept;
  FleetResult run(const Progress& progress);

 private:
  static constexpr std::size_t kReportEvery = 256;  // requests between two calls of the progress hook
  static constexpr auto kReportAfter = std::chrono::milliseconds(50);  // or this

  struct Pool {
    WorkerPool config;
    std::unique_ptr<TierRun> tiers;         // that its workers share; null when each has its own
    std::vector<EventTable> shared_events;  // of those tiers, that the router has been told of, if they are kept
    std::size_t first_worker = 0;
  };
  struct Worker {
    std::unique_ptr<Engine> engine;
    std::uint32_t pool = 0;
    std::vector<std::uint64_t> rows;              // by the engine's request index
    EventQueue::Handle next = EventQueue::kNone;  // its entry among step ends
    bool begins = false;                          // it has one among beginnings
    bool resting = false;                         // its plain steps are not played yet; `next` is their end
    std::uint64_t ready_round = 0;                // of beginnings: the last it came too late for
    std::vector<RequestRecord> finished;          // and not recorded
    EventTable events;                            // that it has told so far, if they are kept
  };

  void make_engine(std::size_t index);
  bool user_policies() const noexcept;
  bool shares_tiers() const noexcept;
  bool free_prompts() const;
  bool can_be_looked_at() const noexcept;

  // fleet_alone.cpp: workers that never meet
  void run_independent(unsigned threads, const Progress& progress);
  void play_in_threads(unsigned threads, const std::vector<std::vector<std::uint64_t>>& rows, const Progress& progress);
  void play_alone(std::size_t index, const std::vector<std::uint64_t>& rows, const Progress& progress);

  // fleet_together.cpp: workers that meet, in the order of the queue
  void run_together(const Progress& progress);
  void open_arrivals();
  void push_next_arrival();
  void push_arrival(std::int64_t time_ns, std::uint64_t row);
  void arrive(std::uint64_t row);
  void place(std::uint64_t row, std::size_t worker);
  void release();  // those that need not wait in the router any longer
  void record_finished(std::size_t worker);
  void after(std::uint64_t row, std::int64_t time_ns);
  std::uint64_t order_of(std::size_t worker) const;
  void want_begin(std::size_t worker);
  void forget(EventQueue::Handle& handle);
  // … step by step,
  void land();
  void end_step(std::size_t worker);
  void begin_all();
  void step_together();
  void begin_step(std::size_t worker);
  void open_step(std::size_t worker);
  void rouse(std::size_t worker, bool landing);
  void rest_on(std::size_t worker);
  void set_resting(Worker& worker, bool on);
  // … or each as far as nothing can reach it.
  void absorb(Worker& worker, const StepEffects& effects);
  void join(std::size_t worker);
  void look(std::size_t worker);
  void halt();
  void plan(std::size_t worker);
  // What a router is told.
  bool bring_up_to_date();
  bool gather_events();
  bool tell_router(std::size_t publisher, std::uint32_t pool, std::uint64_t owner, EventTable& kept);
  void deliver(std::size_t index);

  // FleetView
  std::int64_t now_ns() const override { return now_ns_; }
  std::span<const WorkerLoad> loads() const override { return loads_; }
  WorkerState state(std::size_t worker) override;
  std::uint32_t pool_of(std::size_t worker) const override { return workers_.at(worker).pool; }
  bool held(std::span<const BlockIdentity> prompt, std::vector<std::uint32_t>& out) override;

  void report(const Progress& progress);
  std::uint64_t session_of(std::uint64_t row) const { return session_.empty() ? row : session_[row]; }
  std::optional<std::size_t> route(std::uint64_t row);
  std::optional<std::string> why_not(std::uint64_t row, const Pool& pool) const;
  bool fits(std::uint64_t row, std::size_t worker);
  void reject(std::uint64_t row, const std::string& why);
  std::shared_ptr<const IdentitySource> identities_of(std::uint64_t row, std::uint32_t block_size) const;
  void submit(std::size_t worker, std::uint64_t row, std::int64_t arrival_ns);
  void require_progress(const Worker& worker) const;

  // fleet_columns.cpp
  void prepare_columns();
  void collect(std::size_t index);  // what a worker leaves, which has ended; its engine goes
  void keep(const Worker& worker, const RequestRecord& record);  // of a request that has ended
  void keep_events(Worker& worker, TimedEvents& room);           // that it has told since the last call
  FleetResult finish_columns();

  FleetConfig config_;
  WorkloadColumns workload_;
  TransferHub hub_;  // of tiers that workers share
  std::vector<Pool> pools_;
  std::vector<Worker> workers_;
  std::vector<WorkerLoad> loads_;
  bool looks_ = false;                  // the router sees what workers hold
  bool observes_ = false;               // or it is told, by events
  bool tracks_ = false;                 // and it wants to know of first tokens and ends
  std::vector<bool> started_;           // rows with a first token, if the router tracks them
  std::vector<std::uint64_t> session_;  // of each row; empty: its own
  bool keeps_events_ = false;           // in the result
  bool stepping_ = false;               // workers that meet take every step in the order of the queue
  bool resting_ = false;                // except for those that concern nobody else
  bool unseen_ = false;                 // nobody asks what happens inside of workers: they may be a step ahead

  EventQueue queue_;
  std::int64_t now_ns_ = 0;
  std::vector<std::uint64_t> first_turns_;  // in the order of their arrival, or of their places (closed loop)
  std::size_t next_first_turn_ = 0;
  std::vector<std::size_t> sleepers_;
  std::vector<std::size_t> beginning_;
  std::uint64_t round_ = 1;  // of beginnings; there may be several at one time
  std::int64_t round_ns_ = -1;
  std::uint64_t rounds_before_ = 1;     // before the first of this time
  std::vector<KvDelivery> deliveries_;  // on their way
  std::vector<std::size_t> free_deliveries_;
  std::int64_t told_ns_ = -1;     // when the router was last brought up to date,
  std::uint64_t told_round_ = 0;  // and after which beginnings
  TimedEvents gathered_;          // by the call at hand

  // What workers held of the last prompt; those that come at the same time mostly begin alike.
  struct {
    std::int64_t time_ns = -1;  // and after which beginnings
    std::uint64_t round = 0;
    std::vector<LineageHash> prompt;
    std::vector<std::uint32_t> blocks;  // by worker
  } seen_;
  // Of the row that the router was last asked about: whoever serves it need not compute them again.
  struct {
    std::uint64_t row = 0;
    std::uint32_t block_size = 0;  // 0: none
    std::shared_ptr<const IdentitySource> identities;
  } asked_;
  std::vector<std::int64_t> arrival_ns_;  // when each row really arrived; -1 if never
  std::vector<std::int32_t> worker_of_;
  std::vector<std::pair<std::int64_t, std::string>> rejections_;
  RunColumns columns_;
  std::atomic<std::size_t> ended_ = 0;
  std::atomic<bool> stop_ = false;
  std::size_t reported_ = 0;
  std::chrono::steady_clock::time_point reported_at_ = std::chrono::steady_clock::now();
};

}  // namespace understudy
