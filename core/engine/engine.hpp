// The engine interface: a simulated engine as its drivers see it.
//
// An engine is a state machine that never reads a clock. A driver submits requests, begins a step, waits until the step
// ends, and ends it. Every call returns its effects, and when the driver must call next. At equal times a step ends
// before requests arrive, and requests arrive before the next step begins.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/exclusive_call.hpp"
#include "base/request_id.hpp"
#include "engine/group_report.hpp"
#include "engine/kv_trace.hpp"
#include "engine/request.hpp"
#include "engine/step_view.hpp"
#include "engine/tier_report.hpp"
#include "engine/token_log.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"

namespace understudy {

struct NewTokens {
  RequestId request = 0;
  std::uint32_t tokens = 0;
};

// A request that a step admits.
struct AdmittedRequest {
  RequestId request = 0;
  std::uint32_t cached_tokens = 0;
  std::array<std::uint64_t, 3> below_tokens{};  // part of them from G2, G3, G4
  std::uint32_t pulled_tokens = 0;              // part of them from a prefill worker
};

// State of an engine between two calls.
enum class Phase : std::uint8_t {
  Idle,    // nothing to do until the driver submits or delivers something
  Ready,   // begin_step is due at wake_ns
  InStep,  // a step is open; end_step is due at wake_ns, or when the step has been computed (kUnknown)
  Asleep,  // waits for transfers; begin_step is due at wake_ns, not after the next one lands
  // No step will make progress until a request is submitted or cancelled (Engine::stall). One that is open still ends
  // at wake_ns.
  Stalled,
};

// Results of a call. Valid until the next call of the same engine.
struct Effects {
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  static constexpr std::int64_t kUnknown = kNever - 1;

  std::vector<NewTokens> tokens;        // in the engine's order; one entry per request and step, or fast-forward
  std::vector<RequestRecord> finished;  // in completion order, each with its reason; cancelled requests included
  // The batch of a step that begins, for a driver that asks for it (EngineSite::reports_batches) and an engine that
  // reports it.
  std::vector<AdmittedRequest> admitted;
  std::vector<RequestId> preempted;
  std::uint64_t batch_tokens = 0;
  bool has_events = false;  // KV events became visible: Engine::take_events
  Phase phase = Phase::Idle;
  std::int64_t wake_ns = kNever;  // when the driver must call next; see Phase

  void clear() noexcept {
    tokens.clear();
    finished.clear();
    admitted.clear();
    preempted.clear();
    batch_tokens = 0;
    has_events = false;
  }
};

struct AdvanceOptions {
  bool stop_on_finish = false;  // return at the end of a step in which a request finished
  // Called now and then between steps with the effects so far; may throw to stop there.
  const std::function<void(const Effects&)>* on_progress = nullptr;
};

struct EngineTotals {
  std::uint64_t steps = 0;
  std::int64_t step_ns = 0;       // duration of all steps
  std::int64_t uncovered_ns = 0;  // part of it: steps outside the range that the timing model was made from
  std::uint64_t preemptions = 0;
  std::uint64_t burst_steps = 0;
  std::uint64_t burst_tokens = 0;
  std::uint64_t draft_rounds = 0;
  std::uint64_t drafted_tokens = 0;
  std::uint64_t accepted_tokens = 0;
  std::uint64_t phantom_hit_blocks = 0;  // hits on blocks that no step ever computed
  std::uint64_t expired_leases = 0;      // of blocks that were kept for a peer and never read
};

// The engine at the moment of the call.
struct EngineSnapshot {
  Phase phase = Phase::Idle;
  std::int64_t wake_ns = Effects::kNever;
  std::size_t running = 0;
  std::size_t waiting = 0;
  std::size_t loading = 0;  // requests whose blocks are loaded from a tier
  std::size_t parked = 0;   // part of them: those that are not counted as waiting
  std::uint64_t free_blocks = 0;
  std::uint64_t cached_blocks = 0;
  std::uint64_t active_blocks = 0;  // all others, held ones included
  std::uint64_t held_blocks = 0;    // being copied to the host
  std::uint64_t evictions = 0;      // since the engine was made, as are all that follow
  std::uint64_t stored_blocks = 0;
  EngineTotals totals;
};

// Hashes of an engine's state between two steps, one per field: equal states have equal hashes.
struct StateDigest {
  static constexpr std::array kFields{"clock",        "running requests", "waiting requests", "planned batch",
                                      "block counts", "totals",           "cached blocks"};
  std::array<std::uint64_t, kFields.size()> values{};
};

// Why an engine makes no progress.
struct Stall {
  struct Waiting {
    RequestId request = 0;
    std::uint32_t tokens = 0;
  };
  bool thrashing = false;  // running requests preempt each other without end; else no request can be admitted
  std::size_t waiting = 0;
  std::vector<Waiting> first;  // a few of them
  std::uint64_t free_blocks = 0;
  std::string note;           // a known defect of the real engine that explains it, or empty
  std::int64_t since_ns = 0;  // when the last step began
};

// Calls are made from one thread at a time. The number of planned batches and the layout of blocks are private: a
// driver sees one step after the other. After a call that throws, the engine can be called again.
class Engine {
 public:
  static constexpr std::int64_t kNever = Effects::kNever;

  virtual ~Engine() = default;

  // ── Required: an engine that implements only these works in every driver ──

  // Queues a request under `spec.id`, which the driver chooses. May end another one (a queue limit). Throws
  // InvalidArgument, and changes nothing, if the request can never run.
  virtual const Effects& submit(RequestSpec spec, std::int64_t now_ns) = 0;
  // Ends a request early; its record is among the effects. Unknown or finished ids are ignored. Its blocks are freed
  // when the real engine would free them.
  virtual const Effects& cancel(RequestId id, std::int64_t now_ns) = 0;
  // Schedules a step. Its end is wake_ns; no step is open if there is nothing to compute. If a timing model or policy
  // throws, no step is open and the call can be repeated; admitted requests stay admitted.
  virtual const Effects& begin_step(std::int64_t now_ns) = 0;
  // Ends the open step and makes its results visible.
  virtual const Effects& end_step(std::int64_t now_ns) = 0;
  virtual EngineSnapshot snapshot() const = 0;

  // ── Optional: the defaults are correct and slow ──

  // Why a request of this size could never run to its end, or nothing.
  virtual std::optional<std::string> never_fits(std::uint32_t /*prompt_tokens*/, std::uint32_t /*max_tokens*/) const {
    return std::nullopt;
  }
  // Runs steps back to back: ends those that end by `until_ns`, begins those that begin before. Stops early when there
  // is nothing to do. The same result as stepping, and faster where an engine overrides it.
  virtual const Effects& advance(std::int64_t until_ns, const AdvanceOptions& options);
  // Lower bound of the time at which a request next finishes, whatever else arrives; the closer, the faster the run.
  virtual std::int64_t next_visible_ns() const { return snapshot().wake_ns; }
  // Notify the engine that transfers of the run have advanced to `now_ns`.
  virtual const Effects& transfers_landed(std::int64_t now_ns);
  // Finish every transfer, for an engine that has no request.
  virtual void finish_transfers() {}
  // For a driver without a queue of transfers: when to call `land` if no step is open; kNever: the engine waits for
  // none.
  virtual std::int64_t next_landing_ns() const { return kNever; }
  // Finish the transfers that end by `now_ns`, each at its time.
  virtual const Effects& land(std::int64_t now_ns) { return transfers_landed(now_ns); }
  // Transfers of this engine are in flight or queued.
  virtual bool has_transfers() const { return false; }
  // While off, only requests that hold blocks go on; for draining and scale-down.
  virtual void set_admitting(bool on);
  // No request holds blocks: while admission is off, a step would find nothing to do.
  virtual bool drained() const { return snapshot().running == 0; }
  virtual Stall stall() const;  // for Phase::Stalled
  // Drops every unreferenced block of the device.
  virtual void forget_cache(std::int64_t now_ns);

  // ── Faults; WrongState where the engine does not have them ──
  // Steps that begin from now on take `factor` times as long; 1 ends that.
  virtual void set_slowdown(double factor);
  // Share of bandwidth of the links to and from a tier, 0.001 to 1, also for transfers in flight. A shared tier's links
  // change for all workers.
  virtual void set_link_share(std::int64_t now_ns, Tier tier, double share);
  // Loads with a block of this tier fail with probability `rate` when they end.
  virtual void set_load_failures(Tier tier, double rate);
  // Times between the tokens of a request so far, before it is cancelled and goes on elsewhere.
  virtual std::vector<std::int64_t> gaps_of(RequestId /*id*/) const { return {}; }

  // Ranks that step together are one engine; each is watched by itself. A request names its rank.
  virtual std::size_t num_ranks() const noexcept { return 1; }
  virtual Engine& rank(std::size_t /*index*/) { return *this; }

  // ── Watching ──
  // Visible KV events since the last call, each with its time, into the memory of `out`.
  virtual void take_events(TimedEvents& out);
  TimedEvents take_events() {
    TimedEvents out;
    take_events(out);
    return out;
  }
  // Blocks that are cached here, for routers and checks.
  virtual const Residency& residency() const;
  // Leading blocks that an admission would find, on the device and below. Reads only.
  virtual std::size_t cached_prefix(std::span<const BlockIdentity> blocks) const;
  // Leading blocks on the device, as known to a subscriber of its events. The first `known` are among them.
  virtual std::size_t published_prefix(std::span<const BlockIdentity> /*blocks*/, std::size_t known) { return known; }
  // Keeps gaps between tokens and load times from here on. Off by default: they grow with every step.
  virtual void keep_times() {}
  virtual void take_gaps(GapSum& /*out*/) {
  }  // adds those of requests that completed since the last call; offline runs need them
  virtual std::vector<EngineSample> samples() const { return {}; }
  // Prepares, or stops preparing, what describe_step returns. On for an engine with EngineSite::on_step.
  virtual void watch_steps(bool /*on*/) {}
  // Describes the step that has just begun; `out` is clear. An engine that reports nothing leaves it so.
  virtual void describe_step(StepView& /*out*/) const {}
  virtual std::vector<TimedKvTrace> take_kv_trace() { return {}; }
  virtual GroupReport group_report() const { return {}; }
  virtual TierReport tier_report() { return {}; }  // once its transfers have landed
  // Throws InvariantViolated if requests, blocks, events or transfers contradict each other. Cost: O(blocks).
  virtual void check() {}
  // State after the last step; requests that it did not see are left out. `with_cached` costs O(blocks).
  virtual StateDigest digest(bool /*with_cached*/) const { return {}; }
  // Set while a call from Python runs; engines that share state share the flag.
  virtual CallFlag& call_flag() noexcept { return call_flag_; }

 private:
  CallFlag call_flag_;
  Effects default_effects_;  // returned by the defaults above
};

}  // namespace understudy
