// Who gets which request. A router is told what workers say of themselves, and chooses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/exclusive_call.hpp"
#include "engine/request.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"

namespace understudy {

// What a router knows of a request.
struct RouteRequest {
  std::uint64_t row = 0;      // of the workload
  std::uint64_t session = 0;  // the row of its first turn
  std::int64_t arrival_ns = 0;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t output_tokens = 0;  // as requested
  std::int64_t priority = 0;
  std::int64_t strict_priority = 0;            // of a router's queue: before every lower one
  std::uint32_t block_size = 0;                // of the first pool
  const IdentitySource* identities = nullptr;  // of its blocks of that size; null without prefix caching
};

// What a router itself counts of a worker, by what it sent there and what came back.
struct WorkerLoad {
  std::uint64_t outstanding_requests = 0;
  std::uint64_t outstanding_tokens = 0;  // prompt and requested output
};

// What a worker says of itself.
struct WorkerState {
  std::uint64_t running = 0;
  std::uint64_t waiting = 0;
  std::uint64_t used_blocks = 0;  // referenced
  std::uint64_t total_blocks = 0;
};

// The fleet as its router sees it, for the length of one call.
class FleetView {
 public:
  virtual ~FleetView() = default;
  virtual std::int64_t now_ns() const = 0;
  virtual std::span<const WorkerLoad> loads() const = 0;  // by worker
  // As of now. Costs more than a load: the worker is played up to this moment.
  virtual WorkerState state(std::size_t worker) = 0;
  virtual std::uint32_t pool_of(std::size_t worker) const = 0;
  // Leading blocks of a prompt that each worker holds, a row a worker and a column a tier, as somebody knows who is
  // told of everything at once. False, and nothing is changed: who wants to know has to be told.
  virtual bool held(std::span<const BlockIdentity> /*prompt*/, std::vector<std::uint32_t>& /*out*/) { return false; }
};

// What happened to blocks in one step of a worker, or on a tier that the run shares.
struct KvDelivery {
  static constexpr std::size_t kShared = ~std::size_t{0};

  std::size_t worker = 0;    // kShared: a tier that the workers of a pool share
  std::uint32_t pool = 0;    // of either
  std::int64_t time_ns = 0;  // when it became visible where it happened
  DrainedEvents events;
};

// A request that waited in a router has a worker.
struct Released {
  std::uint64_t row = 0;
  std::size_t worker = 0;
};

class Router {
 public:
  static constexpr std::size_t kLater = ~std::size_t{0};

  virtual ~Router() = default;

  CallFlag& call_flag() noexcept { return call_flag_; }  // a run takes one from its begin to its end

  // A run begins with as many workers as there are numbers: prompt tokens that fit into a step of each. What was known
  // of another run is forgotten.
  virtual void begin(std::span<const std::uint64_t> /*batch_tokens*/) {}
  // Then: the pool of each worker, whose shared tiers it reaches. Unless told, all are of one.
  virtual void set_pools(std::span<const std::uint32_t> /*pool_of*/) {}

  // The worker of a request, below view.loads().size(); kLater: it waits here.
  virtual std::size_t choose(const RouteRequest& request, FleetView& view) = 0;

  // Whether FleetView::held would do instead of being told what happens to blocks: a view that nothing delays or loses
  // is what is there.
  virtual bool looks() const noexcept { return false; }
  // Whether it wants to be told what happens to blocks, and how long that takes to reach it.
  virtual bool observes() const noexcept { return false; }
  virtual std::int64_t event_delay_ns() const noexcept { return 0; }
  virtual void observe(const KvDelivery&) {}
  // All that a worker has told since the last time, for a router that itself holds back what has not reached it yet.
  // False: it wants deliveries.
  virtual bool gather(std::size_t /*worker*/, const TimedEvents&) { return false; }
  virtual bool gather_shared(std::uint32_t /*pool*/, const TimedEvents&) { return false; }

  // A step of the worker has ended, and all of its events have been gathered. InvariantViolated when what the router
  // should know exactly is not what is there.
  virtual void check(std::size_t /*worker*/, const Residency& /*store*/) {}

  // Whether it wants to know which requests have their first token, and which have ended: told before it is asked
  // again.
  virtual bool tracks() const noexcept { return false; }
  virtual void first_token(std::uint64_t /*row*/) {}
  virtual void ended(std::uint64_t /*row*/) {}

  // Whether requests may wait in it; it then tracks. After each first token and end: the next that need not wait any
  // longer, if there is one.
  virtual bool queues() const noexcept { return false; }
  virtual std::optional<Released> release(std::int64_t /*now_ns*/) { return std::nullopt; }

  // Whether it may ask for the state of a worker, which then has to be where it is now.
  virtual bool asks_workers() const noexcept { return false; }

  // Whether its choice is a matter of the requests alone, so that workers may be played one after another.
  virtual bool blind() const noexcept { return false; }

 private:
  CallFlag call_flag_;
};

// By name: round_robin, random, least_loaded (fewest outstanding tokens; of equals the first), power_of_two (the
// less loaded of two that are drawn), session_affinity (where its session began). Null for any other.
std::shared_ptr<Router> make_router(const std::string& name, std::uint64_t seed);

}  // namespace understudy
