// A step from its beginning to its end, and many of them: what drivers call.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/leap.hpp"

namespace understudy {

void VllmEngine::require_time(std::int64_t now_ns) const {
  if (const std::int64_t here_ns = in_step_ ? begun_ns_ : now_ns_; now_ns < here_ns) {
    throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", here_ns,
                in_step_ ? ", when the step began" : ", to where the engine has come", ": time never goes backwards");
  }
  if (now_ns > kLatestNs && !(in_step_ && now_ns <= now_ns_)) {
    throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns,
                " is after 2^62 (146 years), where times end: ", "count nanoseconds from the beginning of the run");
  }
  if (!tiers_ || catching_up_ || now_ns >= tiers_->hub().links().now_ns()) return;
  throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", tiers_->hub().links().now_ns(),
              ", to where the transfers have come: time never goes backwards");
}

std::int64_t VllmEngine::begin_step(std::int64_t now_ns) {
  if (!in_step_) leap_->close();
  greet(now_ns);
  // Behind an empty queue, the batch that begins now is scheduled first.
  std::int64_t ready_ns = now_ns;
  if (planned_.empty()) {
    ready_ns = begin_transfers_alone(now_ns);
    const std::int64_t duration_ns = try_schedule(now_ns);
    if (!found_work(now_ns)) return 0;
    if (!config_.async_scheduling) {
      const std::int64_t flushed_ns = offload_ ? begin_transfers(std::exchange(orders_, {}), now_ns) - now_ns : 0;
      open_step(now_ns, load_, duration_ns + flushed_ns);
      return duration_ns + flushed_ns;
    }
    planned_ = {log_.scheduled, load_, duration_ns};
    if (offload_) planned_.orders = std::exchange(orders_, {});
    if (observer_ && !planned_.empty()) {  // it is told of every schedule, and of both halves
      observer_(false);
      observer_(true);
      log_.clear();
    }
  }
  if (planned_.duration_ns == Batch::kUnknown) {
    planned_.duration_ns = timing_.duration_ns(planned_.load, capacity_tokens_);
  }
  Batch behind;
  if (!planned_.empty()) {
    behind.duration_ns = try_schedule(now_ns);
    behind.turns = log_.scheduled;
    behind.load = load_;
    if (offload_) behind.orders = std::exchange(orders_, {});
  }
  open_ = std::exchange(planned_, std::move(behind));
  if (offload_) {
    open_.duration_ns += std::max(ready_ns, begin_transfers(std::move(open_.orders), now_ns)) - now_ns;
  }
  open_step(now_ns, open_.load, open_.duration_ns);
  return open_.duration_ns;
}

// The time of a step has come: what has landed by then is here.
void VllmEngine::greet(std::int64_t now_ns) {
  if (in_step_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  require_time(now_ns);
  begun_ns_ = now_ns_ = now_ns;  // also where no step begins, as somebody fails: what is told now stays told
  finish_bound_.reset();
  read_input(now_ns);
  landing_wait_.visited = false;
  log_.clear();
  if (tiers_ && !leap_->has_begun(now_ns)) {
    announcer_.stop_holding();
    tiers_->hub().run_until(now_ns);
    resume_loaded();
    if (offload_links_ && offload_links_->has_done()) report_offload(offload_links_->take_done());
    landings_noticed_ = tiers_->landings();
    announcer_.show(now_ns);
  }
  leap_->forget_begun();
}

std::int64_t VllmEngine::try_schedule(std::int64_t now_ns) {
  announcer_.hold();
  try {
    return schedule(now_ns);
  } catch (...) {  // a policy or a timing model of the user's: no step begins
    announcer_.release(now_ns);
    throw;
  }
}

// After a schedule behind an empty queue: whether a step begins. Else the engine waits for a landing.
bool VllmEngine::found_work(std::int64_t now_ns) {
  const bool nothing = log_.scheduled.empty() && log_.preempted.empty() && planned_.empty();
  const bool landings = tiers_ && (!tiers_->idle() || (offload_links_ && !offload_links_->idle()));
  landing_wait_.on = nothing && landings && !idle();
  if (landing_wait_.on) {
    landing_wait_.released = tiers_->released();
    now_ns_ = now_ns;
    if (offload_) (void)begin_transfers(std::exchange(orders_, {}), now_ns);
    announcer_.release(now_ns);
    return false;
  }
  const bool stuck = nothing && admitting_ && !(running_.empty() && num_waiting() == 0) && !still_offloads();
  if (!stuck) stuck_.reset();
  if (stuck && !stuck_) stuck_ = kv_->available();
  return true;
}

void VllmEngine::open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns) {
  ++totals_.steps;
  count_time(load, duration_ns);
  in_step_ = true;
  if (thrashing() && !stuck_) stuck_ = kv_->available();
  landing_wait_.on = false;
  now_ns_ = now_ns;
  if (tiers_) announcer_.show(now_ns);  // what went on the host
  // Blocks for a prompt are held while it is computed; one more for a token can wait for the end of its step.
  if (load.mocker.prefill_requests > 0) sample(running_.size());
  now_ns_ = now_ns + duration_ns;
  if (observer_) observer_(false);
}

std::int64_t VllmEngine::retime_step(std::uint64_t rank_tokens) {
  StepLoad& load = config_.async_scheduling ? open_.load : load_;
  const std::int64_t alone_ns = timing_.duration_ns(load, capacity_tokens_);
  load.rank_tokens = rank_tokens;
  const std::int64_t later_ns = timing_.duration_ns(load, capacity_tokens_) - alone_ns;
  count_time(load, later_ns);
  now_ns_ += later_ns;
  return now_ns_ - begun_ns_;
}

const StepEffects& VllmEngine::end_step(std::int64_t end_ns) {
  new_effects();
  finish_step(end_ns);
  return hand_out();
}

// What a call did that failed in the middle is told by the next.
void VllmEngine::new_effects() {
  if (!std::exchange(handed_out_, false)) return;
  effects_.tokens.clear();
  effects_.finished.clear();
}

const StepEffects& VllmEngine::hand_out() {
  handed_out_ = true;
  effects_.wake_ns = wake_ns();
  return effects_;
}

void VllmEngine::finish_step(std::int64_t end_ns) {
  if (!in_step_) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  require_time(end_ns);
  if (leap_->in_step()) return leap_->finish_step();
  if (tiers_) {
    tiers_->hub().run_until(end_ns);
    if (!offload_) write_through(batch(), end_ns);  // may ask a policy of the user's, and fail
  }
  in_step_ = false;
  finish_bound_.reset();
  now_ns_ = end_ns;
  receive(batch(), end_ns);
  if (offload_steps_) report_offload(std::exchange(open_.reports, {}));
  if (offload_links_) offload_after_step(end_ns);
  sample(running_.size());
  close_step();
  if (observer_) {
    observer_(true);
    announcer_.forget_taken();
  }
}

void VllmEngine::begin_turn(std::int64_t now_ns) {
  if (!config_.async_scheduling) {
    (void)begin_step(now_ns);
    return;
  }
  greet(now_ns);
  const std::int64_t duration_ns = try_schedule(now_ns);
  if (!found_work(now_ns)) return;
  Batch behind{log_.scheduled, load_, duration_ns};
  if (offload_steps_) behind.reports = run_offload_step();
  open_ = std::exchange(planned_, std::move(behind));
  open_step(now_ns, {}, 0);
}

const StepEffects& VllmEngine::end_turn(std::int64_t now_ns) { return end_step(now_ns); }

// The step that ends now has told everything.
void VllmEngine::close_step() {
  announcer_.release(now_ns_);
  if (!config_.check) return;
  // Everything is compared every step in a small pool, and in a large one so seldom that it costs a step little; sooner
  // where nothing is under way, unless there is much that has not changed since.
  constexpr std::uint64_t kSlotsAStep = 16;
  constexpr std::uint64_t kSlotsAStepAtRest = 32;
  const std::uint64_t steps = totals_.steps - steps_at_check_;
  const bool whole = steps * kSlotsAStep >= store_.num_slots() ||
                     (idle() && steps * kSlotsAStepAtRest >= store_.num_slots() - store_.num_empty());
  if (whole) steps_at_check_ = totals_.steps;
  announcer_.check(whole ? EventTruth::Scope::Whole : EventTruth::Scope::All);
  if (whole) store_.check();
  check_counts(whole);
}

const StepEffects& VllmEngine::advance(std::int64_t until_ns, bool stop_on_finish) {
  if (until_ns < begun_ns_) {
    throw Error(ErrorKind::InvalidArgument, "until_ns ", until_ns, " is before ", begun_ns_,
                ", when the last step began: time never goes backwards");
  }
  new_effects();
  play(until_ns, stop_on_finish, Last::Open);
  return hand_out();
}

const StepEffects& VllmEngine::advance_lazily(std::int64_t until_ns) {
  new_effects();
  play(until_ns, true, Last::Lazy);
  return hand_out();
}

const StepEffects& VllmEngine::advance_through(std::int64_t until_ns) {
  new_effects();
  play(until_ns, false, Last::Played);
  played_through_ = !in_step_ && now_ns_ > until_ns;
  return hand_out();
}

void VllmEngine::play(std::int64_t until_ns, bool stop_on_finish, Last last) {
  if (!admitting_) throw Error(ErrorKind::WrongState, "advance while admissions are off: play step by step");
  played_through_ = false;
  for (std::uint32_t turns = 1;; ++turns) {
    if (turns % 64 == 0 && pause_) pause_(effects_);
    const std::size_t finished = effects_.finished.size();
    if (in_step_) {
      if (now_ns_ > until_ns) return;
      finish_step(now_ns_);
    } else {
      if (now_ns_ >= until_ns || idle() || stuck_) return;
      if (landing_wait_.on && !landing_wait_over()) {
        const std::optional<std::int64_t> wake = tiers_->hub().next_wake_ns();
        if (wake && *wake > until_ns) return;
        if (wake) {
          now_ns_ = std::max(now_ns_, *wake);  // also where a policy fails at it: transfers have come that far
          tiers_->hub().run_until(*wake);
          notice_landings(now_ns_);
          if (!landing_wait_over()) continue;
        }
        if (now_ns_ >= until_ns) return;
      }
      const bool leaps = leaping_ && leap_->possible();
      if (last == Last::Lazy && leaps) {
        if (tiers_ ? now_ns_ + leap_->step_of_all_ns() > until_ns : no_finish_before() > until_ns) return;
      }
      const bool leapt = leaps && leap_->play(until_ns, stop_on_finish, last == Last::Played && !offload_);
      const bool out_of_time = leaps && leap_->out_of_time();
      if (out_of_time && ((last == Last::Lazy && !tiers_ && until_ns <= kLatestNs) || now_ns_ >= until_ns)) return;
      // In the latter case, the one that it had no time for.
      if (!leapt || (out_of_time && last != Last::Lazy)) begin_step(now_ns_);
      if (stuck_ && in_step_ && batch().empty()) {
        in_step_ = false;  // nothing was scheduled, so nothing ends
        announcer_.release(now_ns_);
        --totals_.steps;
      }
    }
    if (stop_on_finish && effects_.finished.size() > finished) return;
  }
}

}  // namespace understudy
