// Routing interface: a router observes workers and chooses one for each request.
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
#include "router/worker.hpp"

namespace understudy {

// A request as its router sees it.
struct RouteRequest {
  static constexpr std::uint64_t kNoSession = ~std::uint64_t{0};

  std::uint64_t row = 0;                      // of the workload
  std::uint64_t session = 0;                  // row of its first turn
  std::uint64_t parent_session = kNoSession;  // session that started this one, as an agent starts another
  RequestStage stage = RequestStage::Whole;
  std::int64_t arrival_ns = 0;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t output_tokens = 0;  // as requested
  std::int64_t priority = 0;
  std::int64_t strict_priority = 0;            // in a router's queue: before every lower one
  std::uint32_t block_size = 0;                // of the first pool
  const IdentitySource* identities = nullptr;  // of its blocks of that size; null without prefix caching
};

// The fleet as its router sees it; valid for one call. Workers that have left keep their place in what is by id.
class FleetView {
 public:
  virtual ~FleetView() = default;
  virtual std::int64_t now_ns() const = 0;
  // Workers that may be chosen for this request, ascending; never empty.
  virtual std::span<const WorkerId> ready() const = 0;
  virtual std::span<const WorkerLoad> loads() const = 0;  // by id
  virtual const WorkerInfo& info(WorkerId worker) const = 0;
  virtual WorkerState state(WorkerId worker) const = 0;
  // Counts as of now. Costs more than loads(): the worker is advanced to this moment.
  virtual WorkerCounts counts(WorkerId worker) = 0;
  // Leading blocks of a prompt that each worker holds now, a row per id and a column per tier. False with nothing
  // changed: not available; use events.
  virtual bool held(std::span<const BlockIdentity> /*prompt*/, std::vector<std::uint32_t>& /*out*/) { return false; }
};

// KV events of one step of a worker, or of a shared tier.
struct KvDelivery {
  static constexpr WorkerId kShared = ~std::size_t{0};

  WorkerId worker = 0;       // kShared: a tier shared by the workers of a pool
  std::uint32_t pool = 0;    // of the worker or the tier
  std::int64_t time_ns = 0;  // when it became visible at its origin
  DrainedEvents events;
};

// A queued request that now has a worker.
struct Released {
  std::uint64_t row = 0;
  WorkerId worker = 0;
};

class Router {
 public:
  static constexpr WorkerId kLater = ~std::size_t{0};

  virtual ~Router() = default;

  CallFlag& call_flag() noexcept { return call_flag_; }  // set during a run

  // Begins a run without workers. Forgets earlier runs.
  virtual void begin() {}
  // A worker appeared, with the next id; it is ready. Later changes of its state follow.
  virtual void add_worker(const WorkerInfo& /*worker*/) {}
  virtual void set_state(WorkerId /*worker*/, WorkerState /*state*/) {}

  // Forgets the blocks of a worker, as a router that restarts does. False: it has no index of its own, and receives
  // events that remove them.
  virtual bool forget_blocks(WorkerId /*worker*/) { return false; }

  // Returns the worker of a request, out of view.ready(); kLater: it waits in the router.
  virtual WorkerId choose(const RouteRequest& request, FleetView& view) = 0;

  // True if FleetView::held can replace events, because nothing delays or loses them.
  virtual bool reads_residency() const noexcept { return false; }
  // True if it subscribes to KV events; event_delay_ns is their delay.
  virtual bool observes() const noexcept { return false; }
  virtual std::int64_t event_delay_ns() const noexcept { return 0; }
  virtual void observe(const KvDelivery&) {}
  // Receives all events of a worker since the last call, for a router that delays them itself. False: use observe.
  virtual bool gather(WorkerId /*worker*/, const TimedEvents&) { return false; }
  virtual bool gather_shared(std::uint32_t /*pool*/, const TimedEvents&) { return false; }

  // Whether `check` compares an index, which `gather` fills. It is called after a step whose events were all gathered,
  // and throws InvariantViolated when the router's exact knowledge differs from the store.
  virtual bool has_index() const noexcept { return false; }
  virtual void check(WorkerId /*worker*/, const Residency& /*store*/) {}

  // True if it subscribes to first tokens and ends of requests, which it receives before the next choose.
  virtual bool tracks() const noexcept { return false; }
  virtual void first_token(std::uint64_t /*row*/) {}
  virtual void ended(std::uint64_t /*row*/) {}

  // True if requests may wait in it (it then tracks). release() returns the next queued request that may start, polled
  // after each first token and end.
  virtual bool queues() const noexcept { return false; }
  virtual std::optional<Released> release(std::int64_t /*now_ns*/) { return std::nullopt; }

  // True if it may read the state of workers, which must then be up to date.
  virtual bool asks_workers() const noexcept { return false; }

  // True if its choice depends on the requests only, so that workers can run one after another.
  virtual bool blind() const noexcept { return false; }

 private:
  CallFlag call_flag_;
};

// Returns a router by name: round_robin, random, least_loaded (fewest outstanding tokens, then lowest id),
// power_of_two (less loaded of two random ones), session_affinity (worker of the session), session_tree (and of the
// session that started it). Null for other names.
std::shared_ptr<Router> make_router(const std::string& name, std::uint64_t seed);

}  // namespace understudy
