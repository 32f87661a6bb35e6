// One step from begin to end, and the loop over many: the calls of a driver.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"
#include "engine/vllm/rank_group.hpp"

namespace understudy {

void VllmEngine::require_time(std::int64_t now_ns) const {
  if (const std::int64_t here_ns = clock_.in_step || is_polling() ? clock_.begun_ns : clock_.now_ns; now_ns < here_ns) {
    throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", here_ns,
                clock_.in_step ? ", when the step began" : ", to where the engine has come",
                ": time never goes backwards");
  }
  if (now_ns > StepClock::kLatestNs && !(clock_.in_step && now_ns <= clock_.now_ns)) {
    throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns,
                " is after 2^62 (146 years), where times end: ", "count nanoseconds from the beginning of the run");
  }
  if (!tiers_ || now_ns >= tiers_->hub().links().now_ns()) return;
  throw Error(ErrorKind::InvalidArgument, "now_ns ", now_ns, " is before ", tiers_->hub().links().now_ns(),
              ", to where the transfers have come: time never goes backwards");
}

void VllmEngine::skip_to(std::int64_t time_ns) noexcept {
  clock_.now_ns = is_polling() ? poll_at(time_ns) : std::max(clock_.now_ns, time_ns);
  finish_bound_.reset();
}

const Effects& VllmEngine::begin_step(std::int64_t now_ns) {
  clear_returned_effects();
  if (config_.lockstep_ns > 0 && config_.async_scheduling) {
    // The update that follows a schedule is that of the step before, which ends now.
    begin_recorded_step(now_ns);
    finish_step(now_ns);
    clock_.now_ns = now_ns + config_.lockstep_ns;
    return return_effects();
  }
  begin_one_step(now_ns);
  if (config_.lockstep_ns > 0 && clock_.in_step) clock_.now_ns = now_ns + config_.lockstep_ns;
  if (reports_batches_) report_batch();
  return return_effects();
}

void VllmEngine::report_batch() {
  for (std::size_t i = 0; i < scheduler_->log().admitted.size(); ++i) {
    const RequestId id = scheduler_->log().admitted[i];
    const RequestRecord& record = request(id).record;
    effects_.admitted.push_back({id, scheduler_->log().cached[i], record.below_total, record.pulled_tokens});
  }
  effects_.preempted = scheduler_->log().preempted;
  if (!clock_.in_step) return;
  for (const Scheduled& turn : batch()) effects_.batch_tokens += turn.tokens;
}

void VllmEngine::begin_one_step(std::int64_t now_ns) {
  if (pipeline_) return begin_pipelined_step(now_ns);
  sync_to(now_ns);
  // Behind an empty queue, the beginning batch is scheduled first.
  std::int64_t ready_ns = now_ns;
  if (planned_.empty()) {
    if (waits_for_copies()) return;
    ready_ns = begin_transfers_alone(now_ns);
    const ConnectorOutput late = std::exchange(planned_.output, {});  // of a schedule without tokens
    const std::int64_t duration_ns = try_schedule(now_ns);
    update_from_connector(late, now_ns);
    if (only_polls(!late.empty())) return poll_idle(!late.empty(), now_ns);
    if (!found_work(now_ns)) return;
    if (!config_.async_scheduling) {
      ConnectorOrders& orders = scheduler_->orders();
      open_.output = std::exchange(orders.output, {});
      const std::int64_t flushed_ns = connector_->start_step(std::move(orders.meta), open_.output, now_ns) - now_ns;
      return open_step(now_ns, load_, duration_ns + flushed_ns);
    }
    planned_ = take_batch(duration_ns);
    if (observer_ && !planned_.empty()) {  // every schedule is reported, with both halves
      observer_(*this, false);
      observer_(*this, true);
      scheduler_->log().clear();
    }
  }
  if (planned_.duration_ns == Batch::kUnknown) {
    planned_.duration_ns = timing_.duration_ns(planned_.load, capacity_tokens_);
  }
  Batch behind;
  if (!planned_.empty()) behind = take_batch(try_schedule(now_ns));
  open_ = std::exchange(planned_, std::move(behind));
  open_.duration_ns += std::max(ready_ns, connector_->start_step(std::move(open_.meta), open_.output, now_ns)) - now_ns;
  open_step(now_ns, open_.load, open_.duration_ns);
}

const std::vector<Scheduled>& VllmEngine::batch() const noexcept {
  return config_.async_scheduling || pipeline_ ? open_.turns : scheduler_->log().scheduled;
}

// Brings the engine to the begin of a step: transfers that end by then have landed.
void VllmEngine::sync_to(std::int64_t now_ns) {
  if (clock_.in_step) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  require_time(now_ns);
  clock_.begun_ns = clock_.now_ns =
      now_ns;  // also if no step begins because a policy throws: published events stay published
  finish_bound_.reset();
  read_input(now_ns);
  nap_ = {};
  scheduler_->log().clear();
  // A schedule that is continued must not see transfers that it started.
  const bool continues = scheduler_->continues_at(now_ns);
  if (!continues) scheduler_->forget_suspended();
  if (tiers_ && !continues && !fast_forward_->has_begun(now_ns)) {
    announcer_.stop_holding();
    tiers_->hub().run_until(now_ns);
    scheduler_->resume_loaded();
    if (offload_links_ && offload_links_->has_done()) report_offload(offload_links_->take_done(), now_ns);
    landings_noticed_ = tiers_->landings();
    announcer_.show(now_ns);
  }
  fast_forward_->forget_begun();
}

// Decide on a batch, and return how long it takes.
std::int64_t VllmEngine::try_schedule(std::int64_t now_ns) {
  announcer_.hold();
  std::int64_t duration_ns = 0;
  try {
    scheduler_->schedule(now_ns);
    measure();
    duration_ns = timing_.duration_ns(load_, capacity_tokens_);
  } catch (...) {  // from a user-defined policy or timing model: no step begins
    scheduler_->suspend(now_ns);
    announcer_.release(now_ns);
    throw;
  }
  scheduler_->update_after_schedule(now_ns);
  const StepLog& log = scheduler_->log();
  if (grouped_ != nullptr && onboarding_->on() && log.scheduled.empty() && scheduler_->has_preempted() &&
      tiers_->g1_references() > 0) {
    released_before_ = tiers_->released();
  }
  return duration_ns;
}

// The batch of the last schedule, with the connector's orders.
Batch VllmEngine::take_batch(std::int64_t duration_ns) {
  ConnectorOrders& orders = scheduler_->orders();
  return {scheduler_->log().scheduled, load_, duration_ns, std::move(orders.meta), std::exchange(orders.output, {})};
}

// Measure the scheduled batch into load_.
void VllmEngine::measure() {
  load_.clear();
  MockerLoad& load = load_.mocker;
  const std::uint64_t window = timing_.model->window();
  for (const Scheduled& turn : scheduler_->log().scheduled) {
    const EngineRequest& request = scheduler_->requests()[turn.slot];
    const std::uint32_t computed = request.num_computed_tokens;
    const std::uint32_t prompt = request.spec.prompt_tokens;
    if (computed < prompt) {
      ++load.prefill_requests;
      load.prefill_input_tokens += std::min(computed + turn.tokens, prompt);
      load.prefill_cached_tokens += computed;
    }
    const std::uint32_t length = request.known + request.ahead;
    const bool decodes = computed >= prompt || timing_.charges_first_token;
    if (decodes && computed + turn.tokens >= length && request.spec.max_tokens > 0) {
      ++load.decode_requests;
      load.decode_context_tokens += length;
    }
    ++load_.requests;
    load_.tokens += turn.tokens;
    load_.drafts += turn.drafts;
    if (computed < prompt || turn.tokens > 1 + turn.drafts) {
      load_.chunks.push_back({turn.tokens, computed});
    } else {
      load_.add_decode(computed + turn.tokens, window, turn.drafts);
    }
  }
}

void VllmEngine::open_step(std::int64_t now_ns, const StepLoad& load, std::int64_t duration_ns) {
  UNDERSTUDY_ASSERT(!clock_.in_step, "one step is open at a time");
  UNDERSTUDY_ASSERT(duration_ns >= 0, "a step does not end before it begins");
  ++totals_.steps;
  count_time(load, duration_ns);
  clock_.in_step = true;
  if (thrashing() && !stuck_) stuck_ = kv_->available();
  nap_.on = false;
  clock_.now_ns = now_ns;
  if (tiers_) announcer_.show(now_ns);           // blocks that were stored on the host
  sample(scheduler_->running().size(), now_ns);  // the schedules took blocks
  clock_.now_ns = now_ns + duration_ns;
  if (observer_) observer_(*this, false);
}

void VllmEngine::count_time(const StepLoad& load, std::int64_t duration_ns) noexcept {
  totals_.step_ns += duration_ns;
  if (!timing_.model->covers(load)) totals_.uncovered_ns += duration_ns;
}

std::int64_t VllmEngine::retime_step(const RankLoad& ranks) {
  StepLoad& load = config_.async_scheduling ? open_.load : load_;
  const std::int64_t alone_ns = timing_.duration_ns(load, capacity_tokens_);
  load.rank_tokens = ranks.tokens;
  load.rank_width = ranks.width;
  const std::int64_t later_ns = timing_.duration_ns(load, capacity_tokens_) - alone_ns;
  count_time(load, later_ns);
  clock_.now_ns += later_ns;
  return clock_.now_ns - clock_.begun_ns;
}

const Effects& VllmEngine::end_step(std::int64_t end_ns) {
  clear_returned_effects();
  finish_step(end_ns);
  return return_effects();
}

// Effects of a call that threw are returned by the next.
void VllmEngine::clear_returned_effects() {
  if (std::exchange(effects_returned_, false)) effects_.clear();
}

const Effects& VllmEngine::return_effects() {
  effects_returned_ = true;
  effects_.has_events = announcer_.has_visible();
  effects_.phase = phase();
  effects_.wake_ns = wake_ns();
  return effects_;
}

void VllmEngine::finish_step(std::int64_t end_ns) {
  if (!clock_.in_step) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  require_time(end_ns);
  if (tiers_) {
    tiers_->hub().run_until(end_ns);
    if (!offload_) write_through(batch(), end_ns);  // may call a user-defined policy, which may throw
  }
  UNDERSTUDY_ASSERT(end_ns >= clock_.begun_ns, "time never goes backwards");
  clock_.in_step = false;
  finish_bound_.reset();
  clock_.now_ns = end_ns;
  if (pipeline_) {  // the batch has left it
    for (const Scheduled& turn : open_.turns) {
      if (scheduler_->live(turn)) --scheduler_->decoding().requests[turn.slot].in_flight;
    }
  }
  scheduler_->update_from_output(batch(), end_ns);
  update_from_connector(std::exchange(open_.output, {}), end_ns);
  if (offload_links_) offload_after_step(end_ns);
  sample(scheduler_->running().size(), end_ns);
  close_step();
  if (observer_) {
    observer_(*this, true);
    announcer_.forget_taken();
  }
}

// As recordings count steps: a schedule, and the update that follows it. Asynchronously that is the update of the batch
// before, so that no time passes in between.
void VllmEngine::begin_recorded_step(std::int64_t now_ns) {
  if (!config_.async_scheduling) return begin_one_step(now_ns);
  sync_to(now_ns);
  const std::int64_t duration_ns = try_schedule(now_ns);
  if (!found_work(now_ns)) return;
  Batch behind = take_batch(duration_ns);
  (void)connector_->start_step(std::move(behind.meta), behind.output, now_ns);  // its worker runs with the schedule
  open_ = std::exchange(planned_, std::move(behind));
  open_step(now_ns, {}, 0);
}

// Publishes the events of the step that ends now.
void VllmEngine::close_step() {
  announcer_.release(clock_.now_ns);
  reach_checkpoint(false);
}

const Effects& VllmEngine::advance(std::int64_t until_ns, const AdvanceOptions& options) {
  if (until_ns < clock_.begun_ns) {
    throw Error(ErrorKind::InvalidArgument, "until_ns ", until_ns, " is before ", clock_.begun_ns,
                ", when the last step began: time never goes backwards");
  }
  clear_returned_effects();
  play(until_ns, options);
  return return_effects();
}

void VllmEngine::play(std::int64_t until_ns, const AdvanceOptions& options) {
  if (!scheduler_->is_admitting()) throw Error(ErrorKind::WrongState, "advance while admission is off: step instead");
  for (std::uint32_t rounds = 1;; ++rounds) {
    if (rounds % 64 == 0 && options.on_progress != nullptr) (*options.on_progress)(effects_);
    const std::size_t finished = effects_.finished.size();
    if (clock_.in_step) {
      if (clock_.now_ns > until_ns) return;
      finish_step(clock_.now_ns);
    } else {
      if (clock_.now_ns >= until_ns || rests() || stuck_) return;
      if (nap_.on && !wake_up(until_ns)) return;
      const std::optional<StepReason> reason = why_step();
      const bool possible = !reason;
      if (possible && config_.check) check_state();
      const bool moved = possible && fast_forward(quiet_until(until_ns), options.stop_on_finish);
      if (moved) reach_checkpoint(true);
      const bool out_of_time = possible && fast_forward_->out_of_time();
      if (out_of_time && clock_.now_ns >= until_ns) return;
      // Out of time, an ordinary step follows: the one that did not fit into the fast-forward.
      if (!moved || out_of_time) {
        ++stepped_[static_cast<std::size_t>(reason.value_or(StepReason::Event))];
        begin_one_step(clock_.now_ns);
      }
      if (stuck_ && clock_.in_step && batch().empty()) {
        clock_.in_step = false;  // no batch was scheduled, so no step ends
        announcer_.release(clock_.now_ns);
        --totals_.steps;
      }
    }
    if (options.stop_on_finish && effects_.finished.size() > finished) return;
  }
}

}  // namespace understudy
