// Gathers the results of a run's engines into columns, for fleets in simulated time and for engines on a live clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "events/event_table.hpp"
#include "replay/fleet_result.hpp"

namespace understudy {

class RunColumns {
 public:
  // Prepare columns for `rows` requests without results; with `tiers`, the tier columns too. `events`: keep the events
  // of shared tiers.
  void prepare(std::size_t rows, bool tiers, bool events);
  // Assign the next workers to a pool of that name, with its own tiers. Without a call all workers are in one pool.
  void add_pool(std::string name, std::size_t first_worker);
  // A worker has joined the pool of that number; it has the next id.
  void add_late_worker(std::size_t worker, std::size_t pool) { late_workers_[worker] = pool; }

  // Record a finished request. Threads may call it, each for its own rows.
  void keep(std::uint64_t row, const RequestRecord& record);
  // An engine has ended, and so have its transfers: its samples, totals, gaps and tiers. One that crashed (`is_lost`)
  // leaves no blocks on tiers of its own, and another one has its place.
  void add_engine(std::size_t worker, Engine& engine, bool is_lost = false);
  // Add the state that workers of a pool share, starting at `first_worker`; `earlier` are events taken before,
  // one table per tier, or none.
  void add_shared(TierRun& run, std::size_t first_worker = 0, std::span<EventTable> earlier = {});
  // Add the links of a hub after its engines. Those of workers follow shared ones, in the order of workers.
  void add_links(const Links& links);

  FleetResult& result() noexcept { return result_; }
  GapSum& gaps() noexcept { return gaps_; }
  // All of it, once.
  FleetResult take();

 private:
  struct Pool {
    std::string name;
    std::size_t first_worker = 0;
  };

  static constexpr std::int64_t kShared = -1;

  TierSummary& add_tier(std::size_t worker, const TierUse& use);
  void add_link(std::int64_t worker, LinkUsage usage);
  const Pool& pool_of(std::size_t worker) const;

  FleetResult result_;
  std::vector<Pool> pools_{1};
  std::map<std::size_t, std::size_t> late_workers_;  // with their pools
  bool tiers_ = false;
  bool events_ = false;
  std::vector<std::int64_t> link_worker_;                                    // of result_.links, or kShared
  std::map<std::pair<const Links*, LinkId>, std::int64_t> hub_link_worker_;  // links of engines on a hub
  GapSum gaps_;  // gaps of finished workers, and those handed over earlier by others
};

}  // namespace understudy
