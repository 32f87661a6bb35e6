// Gathers what the engines of a run leave into its columns: of one that a fleet plays, and of one on somebody's clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "events/event_table.hpp"
#include "replay/fleet_result.hpp"

namespace understudy {

class RunColumns {
 public:
  // Of so many requests, none of which has left anything; with `tiers`, those columns too. `events`: what shared tiers
  // told is kept.
  void prepare(std::size_t rows, bool tiers, bool events);
  // The next workers are of a pool of that name, whose tiers stand by themselves. Unless told, all are of one.
  void add_pool(std::string name, std::size_t first_worker);

  // A request has ended. Threads may call it, each for rows of its own.
  void keep(std::uint64_t row, const RequestRecord& record);
  // An engine has ended, and so have its transfers: its samples, totals, gaps and tiers.
  void add_engine(std::size_t worker, Engine& engine);
  // What workers of a pool share, whose first is that one; `told` are events that were taken before, one table a tier,
  // or none.
  void add_shared(TierRun& run, std::size_t first_worker = 0, std::span<EventTable> told = {});
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

  TierSummary& add_tier(std::size_t worker, const TierUse& use);
  const Pool& pool_of(std::size_t worker) const;

  FleetResult result_;
  std::vector<Pool> pools_{1};
  bool tiers_ = false;
  bool events_ = false;
  GapSum gaps_;  // of workers that have ended, and what others have given before
};

}  // namespace understudy
