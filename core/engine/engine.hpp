// A simulated engine as its drivers see it: a state machine that is told the time.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/request_id.hpp"
#include "engine/request.hpp"
#include "engine/token_log.hpp"
#include "events/event_log.hpp"

namespace understudy {

class WorkerTiers;

struct NewTokens {
  RequestId request = 0;
  std::uint32_t tokens = 0;
};

// What became visible. Valid until the next call that returns one.
struct StepEffects {
  std::vector<NewTokens> tokens;        // in the engine's order; a request once for a step, and for a leap
  std::vector<RequestRecord> finished;  // in the order in which they ended
  std::int64_t wake_ns = 0;             // Engine::wake_ns
};

struct EngineTotals {
  std::uint64_t steps = 0;
  std::int64_t step_ns = 0;       // that they take, together
  std::int64_t uncovered_ns = 0;  // of that, in steps unlike those that the timing model was made from
  std::uint64_t preemptions = 0;
  std::uint64_t burst_steps = 0;   // turns that ended in a burst
  std::uint64_t burst_tokens = 0;  // and its tokens
  std::uint64_t draft_rounds = 0;  // turns that verified drafts
  std::uint64_t drafted_tokens = 0;
  std::uint64_t accepted_tokens = 0;
  std::uint64_t phantom_hit_blocks = 0;  // hits on blocks that no step ever computed
};

// The engine at the moment of the call.
struct EngineSnapshot {
  std::size_t running = 0;
  std::size_t waiting = 0;
  std::size_t loading = 0;  // requests whose blocks come from a tier
  std::uint64_t free_blocks = 0;
  std::uint64_t cached_blocks = 0;
  std::uint64_t active_blocks = 0;  // the rest; held ones among them
  std::uint64_t held_blocks = 0;    // on their way to the host
  std::uint64_t evictions = 0;      // since it was made, and so are the next
  std::uint64_t stored_blocks = 0;
  EngineTotals totals;
};

// Why an engine makes no progress.
struct Stall {
  struct Waiting {
    RequestId request = 0;
    std::uint32_t tokens = 0;
  };
  bool thrashing = false;  // those that run preempt each other without end; else none can be admitted
  std::size_t waiting = 0;
  std::vector<Waiting> first;  // of them, a few
  std::uint64_t free_blocks = 0;
  bool holders_starve = false;  // among those that wait are some that hold blocks, behind one that finds too few
};

// One thread at a time. A driver is a loop: submit what has come, begin_step, let its duration pass, end_step. At one
// time a step ends before requests come, and those come before the next step begins. How many batches an engine keeps
// ahead, and how it keeps blocks, is its own business: outside there are steps, one after the other.
class Engine {
 public:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  virtual ~Engine() = default;

  // ── Requests ──
  // Queues it; the next step that is scheduled sees it. InvalidArgument when it makes no sense.
  virtual RequestId submit(RequestSpec spec) = 0;
  // Why a request of this size could never run to its end, or nothing.
  virtual std::optional<std::string> never_fits(std::uint32_t prompt_tokens, std::uint32_t max_tokens) const = 0;
  // It gets no more tokens, and leaves its record here: its blocks are free when the engine would free them. Nothing
  // happens, and nothing is returned, when the id is unknown or the request has ended.
  virtual std::optional<RequestRecord> cancel(RequestId id, std::int64_t now_ns) = 0;

  // ── Steps ──
  // Schedules, and returns how long the step takes (0 when there was nothing to compute). Between steps only. When the
  // timing model raises, so does this, and no step is open: the engine has come to `now_ns`, and goes on when it is
  // asked again. Who was admitted stays so, with its blocks, which kvbm lets others find as it does computed or not. No
  // step is open afterwards when `asleep`.
  virtual std::int64_t begin_step(std::int64_t now_ns) = 0;
  // The open step ends: its tokens are visible.
  virtual const StepEffects& end_step(std::int64_t now_ns) = 0;
  // Plays steps back to back up to `until_ns`: ends those that end by then, begins those that begin before. A step that
  // is still in progress then stays open. Stops early when idle or stuck, or at the end of a step in which a request
  // finished if `stop_on_finish`. The same as stepping, and faster.
  virtual const StepEffects& advance(std::int64_t until_ns, bool stop_on_finish) = 0;
  // The same up to the first finish, except that steps which concern nobody outside need not have been played:
  // `advance` before anything else comes.
  virtual const StepEffects& advance_lazily(std::int64_t until_ns) { return advance(until_ns, true); }
  // The same, except that a step which would be open at `until_ns` may have been played to its end, `now_ns`, whoever
  // comes while it runs: for a driver that lets nobody see what it gives before that time.
  virtual const StepEffects& advance_through(std::int64_t until_ns) { return advance(until_ns, false); }
  // A time before which no request finishes, whoever comes; the closer, the less often a driver looks.
  virtual std::int64_t no_finish_before() const { return wake_ns(); }
  // Idle time passes: nothing happens before `time_ns`. Between steps only.
  virtual void skip_to(std::int64_t time_ns) = 0;

  virtual bool in_step() const = 0;
  virtual std::int64_t now_ns() const = 0;  // when the open step ends, or else when the next may begin
  virtual bool idle() const = 0;            // nobody is inside
  // When begin_step (or, in a step, end_step) is due: `now_ns`, or the next landing when all that is here waits for
  // transfers, or kNever when idle or stuck.
  virtual std::int64_t wake_ns() const = 0;
  // The last step did nothing although requests wait, or requests have long preempted each other without a token: no
  // step will make progress until somebody comes or goes.
  virtual bool stuck() const = 0;
  virtual Stall stall() const = 0;  // what it is stuck on

  // ── Transfers that somebody else runs ──
  // begin_step found nothing that could be computed before a copy or a load ends.
  virtual bool asleep() const = 0;
  // They have come to `now_ns`. Whether a step may begin.
  virtual bool landed(std::int64_t now_ns) = 0;
  // Lets every transfer land; for an engine that has nothing more to do.
  virtual void finish_transfers() = 0;
  virtual WorkerTiers* tiers() noexcept = 0;  // null: none
  virtual const WorkerTiers* tiers() const noexcept = 0;

  // ── Watch ──
  virtual EngineSnapshot snapshot() const = 0;
  // Visible rows since the last call, each with the time from which it is; in the room that `out` has.
  virtual void take_events(TimedEvents& out) = 0;
  TimedEvents take_events() {
    TimedEvents out;
    take_events(out);
    return out;
  }
  // From here on gaps between tokens and the times of loads are kept for who takes them. Nobody takes those of a live
  // engine, and no two are equal: it would grow with every step.
  virtual void keep_times() = 0;
  virtual void take_gaps(GapSum& out) = 0;  // adds those of requests that finished since the last call
  virtual std::vector<EngineSample> samples() const = 0;
  // Called by `advance` now and then, between steps, with what it has done so far; may throw to stop it there.
  virtual void set_pause(std::function<void(const StepEffects&)> pause) = 0;
  // Raises InvariantViolated when requests, blocks and events contradict each other. O(blocks).
  virtual void check() = 0;
};

}  // namespace understudy
