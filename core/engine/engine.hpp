// A simulated engine as its drivers see it: a state machine that is told the time.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/request_id.hpp"
#include "engine/kv_trace.hpp"
#include "engine/request.hpp"
#include "engine/tier_report.hpp"
#include "engine/token_log.hpp"
#include "events/event_log.hpp"
#include "events/event_truth.hpp"

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
  // A step as recordings of schedulers count them: a schedule, and the update that follows it, which may be that of the
  // step before.
  virtual const StepEffects& play_turn(std::int64_t now_ns) {
    (void)begin_step(now_ns);
    return end_step(now_ns);
  }
  // Of ranks that step together: the tokens that the open step computes, and how long it takes once it is known what
  // all of them compute.
  virtual std::uint64_t step_tokens() const = 0;
  virtual std::int64_t retime_step(std::uint64_t rank_tokens) = 0;

  // ── Rest ──
  // For a driver whose engines share transfers: from now on steps are not played that concern nobody outside before the
  // last of them ends (nobody ends, nothing goes below the device). Returns when that is: `catch_up` then, or before
  // anything else comes. When the first of them may, that one has begun (`in_step`), and ends at the time returned; or
  // nothing has, and `begin_step` must. So it is with an engine that never rests.
  virtual std::optional<std::int64_t> rest(std::int64_t /*now_ns*/) { return std::nullopt; }
  // Plays them up to now: a step is open that has not ended. With `landing`, neither has one that ends now.
  virtual const StepEffects& catch_up(std::int64_t now_ns, bool /*landing*/) { return advance(now_ns, false); }
  // Before something lands that steps see in their samples alone: plays those that have ended. The rest goes on, unless
  // a step is open.
  virtual const StepEffects& rest_on(std::int64_t now_ns) { return catch_up(now_ns, true); }
  std::int64_t rested_step_ns() const noexcept { return rested_step_ns_; }  // when the first of them ends

  bool in_step() const noexcept { return in_step_; }
  std::int64_t now_ns() const noexcept { return now_ns_; }  // when the open step ends, or else when the next may begin
  std::int64_t begun_ns() const noexcept { return begun_ns_; }  // when its last step began
  virtual bool idle() const = 0;                                // nobody is inside
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
  // Lets every transfer land, and compares everything where it checks itself; for an engine that has nothing more to
  // do.
  virtual void finish_transfers() = 0;
  virtual WorkerTiers* tiers() noexcept = 0;  // null: none
  virtual const WorkerTiers* tiers() const noexcept = 0;

  // ── Watch ──
  virtual EngineSnapshot snapshot() const = 0;
  // Of an engine that has ended, and so have its transfers.
  virtual TierReport tier_report() = 0;
  // Which blocks it holds, for who has an index of them; and of `blocks` the leading ones on its device, as those would
  // know who are told of every step when it ends.
  virtual const Residency& residency() const = 0;
  virtual std::size_t known_prefix(std::span<const BlockIdentity> blocks) = 0;
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
  virtual std::vector<TimedKvTrace> take_kv_trace() { return {}; }  // if it keeps one
  // Called by `advance` now and then, between steps, with what it has done so far; may throw to stop it there.
  virtual void set_pause(std::function<void(const StepEffects&)> pause) = 0;
  // Raises InvariantViolated when requests, blocks and events contradict each other. O(blocks).
  virtual void check() = 0;

 protected:
  // Drivers look at these at every turn.
  std::int64_t now_ns_ = 0;
  std::int64_t begun_ns_ = 0;
  std::int64_t rested_step_ns_ = 0;
  bool in_step_ = false;
};

}  // namespace understudy
