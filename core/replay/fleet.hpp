// A run: a workload, N simulated workers, and one deterministic order of everything that happens.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/vllm/engine.hpp"

namespace understudy {

enum class Routing : std::uint8_t {
  RoundRobin,
  Random,
  LeastLoaded,  // fewest outstanding tokens, prompt and requested output; ties by index
};

enum class RequestFate : std::uint8_t { Completed = 0, Rejected = 1, Cancelled = 2, Unfinished = 3 };

// Columns of a workload, one row a request; the arrays outlive the run. Rows stand in the order in which ties are
// broken. `next_turn` is -1 for the last turn of a session.
struct WorkloadColumns {
  std::span<const std::int64_t> arrival_ns;
  std::span<const std::int32_t> prompt_tokens;
  std::span<const std::int32_t> output_tokens;
  std::span<const std::int32_t> max_tokens;  // limits of the output, -1 for none; empty: nobody has one
  std::span<const std::int32_t> priority;
  std::span<const std::int32_t> turn;
  std::span<const std::int64_t> next_turn;
  std::span<const std::int64_t> delay_ns;  // between the end of the turn before and this one
  std::span<const std::int64_t> hash_offsets;
  std::span<const std::uint32_t> hash_ids;
  std::span<const bool> output_in_next;                // empty: nowhere
  std::span<const std::int64_t> output_token_offsets;  // empty: no row has exact outputs
  std::span<const std::uint32_t> output_token_ids;
  std::span<const std::int64_t> accepted_draft_offsets;  // empty: no row says how many drafts are accepted
  std::span<const std::uint32_t> accepted_drafts;
  std::uint32_t trace_block_size = 512;
  std::span<const std::int64_t> queue_order;  // orders equal priorities; empty: by arrival
  std::span<const std::string> names;         // empty: row numbers

  std::size_t size() const noexcept { return prompt_tokens.size(); }
  // The limit of a row that has one, else its length.
  std::uint32_t limit(std::size_t row) const noexcept {
    const std::int32_t own = max_tokens.empty() ? -1 : max_tokens[row];
    return static_cast<std::uint32_t>(own < 0 || output_tokens[row] == 0 ? output_tokens[row] : own);
  }
};

struct FleetConfig {
  EngineConfig engine;
  StepTiming timing;
  std::optional<TierConfig> tiers;
  std::uint32_t num_workers = 1;
  Routing routing = Routing::RoundRobin;
  std::uint64_t seed = 0;
  std::uint32_t concurrency = 0;  // sessions at a time; 0: open loop
  bool leaping = true;
  bool check = false;  // verify conservation and the truth of events after every step
  // Above 0: every worker takes a step of this length after another, busy or not, until all requests have ended.
  std::int64_t lockstep_ns = 0;
  // Told of every step in the order of time; see VllmEngine::Observer. Turns leaping off.
  std::function<void(std::size_t worker, VllmEngine& engine, bool ended)> on_step;
};

// One tier at the end of a run; those of the workers together.
struct TierSummary {
  Tier tier = Tier::G1;
  std::uint64_t capacity_blocks = 0;
  std::uint64_t resident_blocks = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t evicted_blocks = 0;
  // Of a tier that the run shares: blocks over time, and its events if they were kept.
  std::vector<SharedTier::Residency> residency;
  TimedEvents events;
};

struct FleetResult {
  std::vector<std::int64_t> arrival_ns;
  std::vector<std::int64_t> first_admit_ns;
  std::vector<std::int64_t> first_token_ns;
  std::vector<std::int64_t> second_token_ns;
  std::vector<std::int64_t> last_token_ns;
  std::vector<std::int64_t> finish_ns;
  std::vector<std::int32_t> output_tokens;
  std::vector<std::int64_t> cached_tokens_first;
  std::vector<std::int64_t> cached_tokens_total;
  std::vector<std::int64_t> looked_up_tokens;
  std::vector<std::int32_t> preemptions;
  std::vector<std::int32_t> worker;
  std::vector<std::uint8_t> fate;
  std::vector<std::uint8_t> finish_reason;  // of what completed: 1 its limit (or the model's), 2 EOS; else 0
  std::vector<std::pair<std::int64_t, std::string>> rejections;

  // With tiers; else empty.
  std::array<std::vector<std::int64_t>, 3> below_tokens_first;  // of cached_tokens_first, from G2, G3, G4
  std::array<std::vector<std::int64_t>, 3> below_tokens_total;
  std::vector<std::int64_t> parked_ns;     // while its blocks were loaded
  std::vector<std::int64_t> room_wait_ns;  // while copies left the device
  std::vector<std::int64_t> onboard_ns;    // of every load
  std::vector<TierSummary> tiers;
  TierTotals tier_totals;
  std::vector<LinkUsage> links;

  std::vector<std::int64_t> gap_ns;  // ascending, with how often each occurred
  std::vector<std::int64_t> gap_count;
  std::vector<EngineSample> samples;
  std::vector<std::int32_t> sample_worker;

  std::vector<TimedEvents> events;  // by worker; empty unless the engines keep them, and so is the trace
  std::vector<std::vector<TimedKvTrace>> kv_trace;

  std::uint64_t steps = 0;
  std::uint64_t preempted = 0;
  std::uint64_t evictions = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t phantom_hit_blocks = 0;
  std::uint64_t burst_steps = 0;
  std::uint64_t burst_tokens = 0;
  std::uint64_t draft_rounds = 0;
  std::uint64_t drafted_tokens = 0;
  std::uint64_t accepted_tokens = 0;
};

class Fleet {
 public:
  // Called now and then, on the thread that runs the fleet, with the number of requests that have ended; may throw to
  // stop the run.
  using Progress = std::function<void(std::size_t)>;

  Fleet(FleetConfig config, WorkloadColumns workload);

  // Whether every worker's requests are known beforehand, so that workers can be played one by one, or in threads.
  bool independent() const noexcept;
  FleetResult run(unsigned threads, const Progress& progress);

 private:
  static constexpr std::size_t kReportEvery = 256;  // requests between two calls of the progress hook
  static constexpr auto kReportAfter = std::chrono::milliseconds(50);  // or this

  struct Arrival {
    std::int64_t time_ns;
    std::uint64_t row;
    bool operator>(const Arrival& other) const { return std::tie(time_ns, row) > std::tie(other.time_ns, other.row); }
  };
  struct Worker {
    std::unique_ptr<VllmEngine> engine;
    std::vector<std::uint64_t> rows;  // by the engine's request index
    std::uint64_t outstanding_tokens = 0;
    std::vector<GapCount> gaps;  // when it is done
  };

  void make_engine(std::size_t index);

  // fleet_alone.cpp
  void run_independent(unsigned threads, const Progress& progress);
  void play_in_threads(unsigned threads, const std::vector<std::vector<std::uint64_t>>& rows, const Progress& progress);
  void play_alone(std::size_t index, const std::vector<std::uint64_t>& rows, const Progress& progress);

  void report(const Progress& progress);
  void run_together(const Progress& progress);
  std::uint64_t order_of(std::size_t worker) const;
  void open_arrivals();
  void arrive(Arrival arrival);
  void settle(Worker& worker, const StepEffects& effects);
  void after(std::uint64_t row, std::int64_t time_ns);

  std::size_t route(std::uint64_t row);
  bool rejected(std::uint64_t row);
  void submit(Worker& worker, std::uint64_t row, std::int64_t arrival_ns);
  void require_progress(const Worker& worker) const;

  // fleet_columns.cpp
  void prepare_columns();
  void collect(std::size_t index);                            // what a worker leaves, which has ended; its engine goes
  void keep(std::uint64_t row, const RequestRecord& record);  // of a request that has ended
  void collect_tiers(const Worker& worker);
  void add_tier(Tier tier, const PoolMetrics& metrics);
  void add_run(TierRun& run);
  FleetResult finish_columns();
  void merge_all_gaps();

  FleetConfig config_;
  WorkloadColumns workload_;
  std::unique_ptr<TierRun> tier_run_;  // unless every worker has its own
  std::vector<Worker> workers_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  std::vector<std::int64_t> arrival_ns_;  // when each row really arrived; -1 if never
  std::vector<std::int32_t> worker_of_;
  std::vector<std::pair<std::int64_t, std::string>> rejections_;
  std::vector<std::uint64_t> sessions_;  // first turns that wait for a place (closed loop)
  std::size_t next_session_ = 0;
  std::size_t next_worker_ = 0;
  std::mt19937_64 random_;
  FleetResult result_;
  std::atomic<std::size_t> ended_ = 0;
  std::atomic<bool> stop_ = false;
  std::size_t reported_ = 0;
  std::chrono::steady_clock::time_point reported_at_ = std::chrono::steady_clock::now();
};

}  // namespace understudy
