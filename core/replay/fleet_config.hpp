// What a run is built from: pools of workers, a router, and the limits and policies of the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/config.hpp"
#include "engine/engine.hpp"
#include "engine/timing.hpp"
#include "replay/checkpoints.hpp"
#include "replay/disaggregation.hpp"
#include "replay/elastic.hpp"
#include "replay/faults.hpp"
#include "replay/play_limits.hpp"
#include "replay/session_keeper.hpp"
#include "replay/step_table.hpp"
#include "router/router.hpp"
#include "tiers/worker_tiers.hpp"

namespace understudy {

// A group of equal workers.
struct WorkerPool {
  std::string name;  // also of its tiers and links; unique where there are several pools
  std::shared_ptr<const EngineConfig> engine;
  StepTiming timing;
  std::optional<TierConfig> tiers;
  std::uint32_t num_workers = 1;
  WorkerRole role = WorkerRole::Both;
};

struct FleetConfig {
  std::vector<WorkerPool> pools;  // the first workers have their ids in this order
  std::shared_ptr<Router> router;
  std::optional<Disaggregation> disaggregation;  // of pools with roles; `router` then chooses prefill workers
  std::optional<Elastic> elastic;                // none: the workers stay the same
  std::vector<Fault> faults;                     // by time; the seed draws what they lose
  LostRequests lost;                             // what becomes of requests that lose their worker
  std::uint64_t fault_seed = 0;
  std::uint32_t concurrency = 0;   // sessions (with a graph: plays) at a time; 0: open loop
  PlayLimits play_limits;          // of plays, in lanes
  SessionPolicy session_policy;    // none: nothing happens to the KV of a session that sleeps
  std::int64_t turnaround_ns = 0;  // from the end of a session to the start of the next one in its place
  unsigned threads = 1;            // above 1: independent workers only
  bool fast_forward = true;
  bool check = false;  // verify the states of engines, their events, the router's index and finish bounds
  std::shared_ptr<Checkpoints> checkpoints;  // record them with fast-forward, else compare them; may be null
  // Above 0: every worker takes steps of this length back to back, busy or not, until all requests have ended.
  std::int64_t lockstep_ns = 0;
  // Above 1: every so many workers of a pool, in the order of their ids, are data-parallel ranks of one engine. They
  // step together, and as long as the slowest of them.
  std::size_t ranks = 1;
  // Called for every step in time order, after it has begun and after it has ended. Turns fast-forward off.
  std::function<void(std::size_t worker, Engine& engine, bool ended)> on_step;
  std::shared_ptr<StepTable> steps;  // records every step; turns fast-forward off too. May be null
};

}  // namespace understudy
