#include "engine/vllm/fast_forward.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <numeric>
#include <span>

namespace understudy {

bool FastForward::play(std::int64_t until_ns, bool stop_on_finish) {
  start(until_ns, stop_on_finish);
  std::exception_ptr failure;  // from a user-defined policy: the steps before it are valid
  try {
    play_steps();
  } catch (...) {
    failure = std::current_exception();
    // Blocks that the current step would have completed are not computed.
    for (const Scheduled& turn : filled_) state_.kv.withdraw(state_.requests[turn.slot], false);
    state_.announcer.release(clock_.now_ns);
  }
  update_requests();
  if (failure) std::rethrow_exception(failure);
  return steps_ > 0;
}

// Write the result of the finished fast-forward to all requests.
void FastForward::update_requests() {
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (order + 1 < members_.size()) request(order + 1).warm();
    if (computes(order)) update_request(order);
  }
  forget_finished();
  if (ahead_) plan_next();
  host_.progressed(steps_);
}

void FastForward::forget_finished() {
  std::erase_if(state_.running,
                [this](RequestSlot id) { return state_.requests[id].status == RequestStatus::Finished; });
}

void FastForward::start(std::int64_t until_ns, bool stop_on_finish) {
  ahead_ = state_.config.async_scheduling;
  names_on_receipt_ = state_.kv.names_on_receipt();
  until_ns_ = std::min(until_ns, StepClock::kLatestNs);  // later, an ordinary step throws
  stop_on_finish_ = stop_on_finish;
  base_ = state_.token_log.next_step();
  steps_ = counted_ = 0;
  sums_ = DecodeSums(*state_.timing.model);
  ordinary_ = out_of_time_ = false;
  filled_.clear();
  members_ = state_.running;
  since_.assign(members_.size(), 0);
  last_.resize(members_.size());
  out_.assign(members_.size(), kOut);
  events_.clear();
  paused_.clear();
  rejoining_.clear();
  const std::vector<Scheduled>& planned = state_.planned.turns;
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    const bool in = ahead_ ? sums_.requests() < planned.size() && planned[sums_.requests()].slot == members_[order]
                           : !state_.tiers || !state_.tiers->waiting(members_[order]);
    if (in) {
      join(order);
      events_.push_back(event_of(order, steps_));
    } else {
      paused_.push_back(order);
    }
  }
  std::ranges::make_heap(events_, std::greater<>());
}

// Plan the batch behind the last executed step, as stepping would have scheduled it.
void FastForward::plan_next() {
  if (state_.fenced) count_schedules();
  Batch& next = state_.planned;
  next.turns.clear();
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (!computes(order)) continue;
    EngineRequest& member = request(order);
    member.last_step = state_.counts.scheduled;
    next.turns.push_back({members_[order], 1, member.num_computed_tokens - 1, true, member.id});
  }
  next.load = StepLoad::of(sums_.load());
  next.duration_ns = Batch::kUnknown;
}

// Each executed step scheduled the one behind it, and freed the blocks whose release was deferred to it.
void FastForward::count_schedules() {
  state_.counts.scheduled += steps_ - counted_;
  state_.counts.processed += steps_ - counted_;
  counted_ = steps_;
}

void FastForward::play_steps() {
  while (running() > 0) {
    if (state_.token_log.crowded()) host_.fold_token_log();
    // A step ahead, no batch is planned once all requests wait.
    if (state_.tiers && (interrupted() || (ahead_ && sums_.requests() == 0) || !resume_paused())) return;
    if (sums_.requests() == 0) {
      if (wait_for_landing()) continue;
      begun_ns_ = clock_.now_ns;  // the next step has begun already
      return;
    }
    const std::uint64_t turn = events_.front().step;
    if (turn > steps_ ? !play_plain_steps(turn) : !play_events()) return;
  }
}

// ── Steps ──

// Between two steps: whether something has landed that an ordinary step must decide on.
bool FastForward::interrupted() {
  state_.announcer.hold();  // the transfer landed in the middle of a step
  state_.tiers->hub().run_until(clock_.now_ns);
  state_.announcer.stop_holding();
  return host_.landed(clock_.now_ns);
}

std::int64_t FastForward::step_ns() const { return state_.timing.duration_ns(sums_.load(), state_.capacity_tokens); }

// Run steps up to the next event of a member, or until a transfer lands. False: time is up.
bool FastForward::play_plain_steps(std::uint64_t until_step) {
  // Copies, which stay in registers.
  DecodeSums sums = sums_;
  std::uint64_t steps = steps_;
  std::int64_t now_ns = clock_.now_ns;
  std::int64_t begun_ns = clock_.begun_ns;
  const std::int64_t from_ns = now_ns;
  const StepTiming& timing = state_.timing;
  const bool covered = timing.model->covers(sums.after(until_step - steps));
  bool stop = false;
  std::exception_ptr failure;  // from a user-defined timing model
  std::array<std::int64_t, StepTiming::kMostAtOnce> room;
  while (steps < until_step && !stop && !out_of_time_) {
    std::span<std::int64_t> durations_ns =
        std::span(room).first(std::min<std::uint64_t>(until_step - steps, room.size()));
    try {
      durations_ns = durations_ns.first(timing.next_steps_ns(sums.load(), state_.capacity_tokens, durations_ns));
    } catch (...) {
      failure = std::current_exception();
      break;
    }
    const auto lands = [&] {
      return state_.tiers->hub().due(std::accumulate(durations_ns.begin(), durations_ns.end(), now_ns));
    };
    if (covered && !state_.token_log.wants_sample() && !(state_.tiers && lands())) {
      // Time passes, and nothing else.
      const std::span<const std::int64_t> ends_ns = ends_in_time(durations_ns, now_ns);
      if (!ends_ns.empty()) {
        begun_ns = ends_ns.size() > 1 ? ends_ns[ends_ns.size() - 2] : now_ns;
        now_ns = clock_.now_ns = ends_ns.back();
      }
      state_.token_log.end_steps(ends_ns);
      steps += ends_ns.size();
      sums.grow(ends_ns.size());
      continue;
    }
    for (const std::int64_t duration_ns : durations_ns) {
      const std::int64_t end_ns = now_ns + duration_ns;
      out_of_time_ = !in_time(now_ns, end_ns);
      if (out_of_time_ || stop) break;
      if (!covered && !timing.model->covers(sums.load())) state_.totals.uncovered_ns += duration_ns;
      begun_ns = now_ns;
      now_ns = clock_.now_ns = end_ns;
      ++steps;
      state_.token_log.end_step(end_ns);
      sums.grow();
      if (state_.tiers && state_.tiers->hub().due(end_ns)) {
        stop = interrupted() || !paused_.empty();
        if (state_.offloads && host_.report_offloads(end_ns)) {
          host_.sample(running(), clock_.now_ns);
          continue;
        }
      }
      if (state_.token_log.wants_sample()) host_.sample(running(), clock_.now_ns);
    }
  }
  clock_.begun_ns = begun_ns;
  state_.totals.steps += steps - steps_;
  state_.totals.step_ns += now_ns - from_ns;
  steps_ = steps;
  sums_ = sums;
  if (failure) std::rethrow_exception(failure);
  return !out_of_time_;
}

// Steps of these durations, the first of which begins now: the ends of those that are in time, in their place.
std::span<const std::int64_t> FastForward::ends_in_time(std::span<std::int64_t> durations_ns, std::int64_t now_ns) {
  std::size_t steps = 0;
  for (; steps < durations_ns.size(); ++steps) {
    const std::int64_t end_ns = now_ns + durations_ns[steps];
    out_of_time_ = !in_time(now_ns, end_ns);
    if (out_of_time_) break;
    durations_ns[steps] = now_ns = end_ns;
  }
  return durations_ns.first(steps);
}

// Run a step with events of members. False: an ordinary step must run it, or none may follow.
bool FastForward::play_events() {
  std::int64_t end_ns = clock_.now_ns + step_ns();
  out_of_time_ = !in_time(clock_.now_ns, end_ns);
  if (out_of_time_) return false;
  const std::uint64_t fresh = gather_due();
  // A hit that the head of the queue has been waiting for, or a preemption.
  if (ordinary_ || fresh > state_.kv.available()) return false;
  clock_.begun_ns = clock_.now_ns;
  const bool at_once = fresh == 0 || state_.has_room(fresh);
  if (!at_once) {
    if (!host_.head_stays()) return false;  // it may use the room that a leaving block makes
    serve_or_pause();
    if (sums_.requests() == 0 && wait_for_landing()) return true;
    begun_ns_ = clock_.now_ns;  // the next step has begun already
    end_ns = clock_.now_ns + step_ns();
    if (sums_.requests() == 0 || !in_time(clock_.now_ns, end_ns) || host_.head_may_move()) return false;
    begun_ns_ = -1;
    state_.announcer.show(clock_.now_ns);  // publish evictions to the host
  }
  state_.announcer.hold();
  clock_.now_ns = end_ns;
  apply_events(!at_once);
  if (fresh > 0 || (state_.grouped != nullptr && !due_.empty())) host_.sample(running(), clock_.begun_ns);
  return end_step();
}

void FastForward::serve_or_pause() {
  state_.announcer.hold();
  std::erase_if(due_, [this](std::uint32_t order) {
    if (serve(order)) return false;
    if (!ahead_) pause(order);
    // The member has a token in the current batch, and none in the one behind it.
    if (ahead_) out_[order] = out_[order] == kRejoining ? kOut : kPausing;
    return out_[order] == kOut;
  });
}

void FastForward::apply_events(bool served) {
  done_.clear();
  for (const std::uint32_t order : due_) {
    if (!served) (void)serve(order);
    if (out_[order] == kRejoining) {
      rejoining_.push_back(order);
    } else if (last_[order] == steps_ || out_[order] == kPausing) {
      done_.push_back(order);
    } else {
      push_event(order, steps_ + 1);
    }
  }
}

// Collect the members with an event in this step; returns how many need a block.
std::uint64_t FastForward::gather_due() {
  const Refusal& refusal = state_.refusal;
  const bool wants_block = refusal.stands && refusal.wants_block && !names_on_receipt_;
  const std::optional<RequestSlot> head =
      state_.grouped != nullptr && refusal.stands ? state_.waiting.candidate() : std::nullopt;
  const bool refused = head.has_value();
  std::uint64_t fresh = 0;
  std::uint64_t freed = 0;  // at most, by windows
  ordinary_ = false;
  due_.clear();
  while (!events_.empty() && events_.front().step == steps_) {
    const std::uint32_t order = events_.front().order;
    std::ranges::pop_heap(events_, std::greater<>());
    events_.pop_back();
    due_.push_back(order);
    // The request ends before its limit, which the scheduler does not know: the batch behind includes it too.
    const RequestSpec& spec = request(order).spec;
    ordinary_ = ordinary_ || (ahead_ && last_[order] == steps_ && spec.outputs() < spec.max_tokens);
    if (state_.grouped != nullptr) {
      if (ahead_ && last_[order] == steps_) continue;
      const std::uint32_t position = computed_by(order, steps_);
      fresh += state_.grouped->step_cost(request(order), position);
      ordinary_ = ordinary_ || state_.grouped->lists_state(request(order), position);  // the schedule stores it
      if (!refused) continue;
      freed += state_.grouped->step_frees(request(order), position);
      ordinary_ =
          ordinary_ || state_.grouped->keys_for(state_.requests[*head], request(order), position + (ahead_ ? 0 : 1));
      continue;
    }
    fresh += begins_block(order) ? 1 : 0;
    const std::uint32_t filled = filled_by(order, steps_);
    if (!wants_block || filled % size_ != 0) continue;
    state_.kv.need_names(request(order), filled);
    ordinary_ = ordinary_ || state_.kv.hash_of(request(order), filled / size_ - 1) == refusal.missing;
  }
  if (refused &&
      (state_.kv.available() + freed >= refusal.needs || state_.grouped->evictions() + fresh > refusal.evictions)) {
    ordinary_ = true;  // the head of the queue may be admitted behind these members
  }
  return fresh;
}

// Publish tokens and retire finished requests. False: the queue or the caller has to act.
bool FastForward::end_step() {
  const std::int64_t end_ns = clock_.now_ns;
  if (state_.tiers) host_.offload_computed(filled_, end_ns);
  ++steps_;
  ++state_.totals.steps;
  state_.token_log.end_step(end_ns);
  state_.totals.step_ns += end_ns - clock_.begun_ns;
  if (!state_.timing.model->covers(sums_.load())) state_.totals.uncovered_ns += end_ns - clock_.begun_ns;
  if (ahead_ && state_.fenced) {
    count_schedules();
    for (const std::uint32_t order : done_) request(order).last_step = state_.counts.processed;
  }
  bool sealed = false;
  bool finished = false;
  // Where blocks are named when their tokens arrive, tokens arrive in order: each request seals its block or ends
  // before the next one's token.
  for (const std::uint32_t order : names_on_receipt_ ? due_ : done_) {
    const std::uint32_t computed = computed_by(order, steps_);
    if (ahead_ && state_.grouped != nullptr) {
      state_.kv.name(request(order), filled_by(order, steps_ - 1));
    } else if (ahead_ && filled_by(order, steps_ - 1) % size_ == 0) {
      name_filled(order, filled_by(order, steps_ - 1) / size_);
    }
    if (names_on_receipt_ && computed % size_ == 0) {
      state_.kv.name(request(order), computed);
      sealed = true;
    }
    if (last_[order] + 1 != steps_) continue;
    finished = true;
    update_request(order);
    if (ahead_) --request(order).num_computed_tokens;  // nothing was scheduled behind its last token
    sums_.remove(request(order).known - 1);            // its share of this step's context
    out_[order] = kOut;
    host_.finish(members_[order], end_ns);
  }
  filled_.clear();
  if (finished) find_longest(steps_ - 1);
  sums_.grow();
  for (const std::uint32_t order : due_) {
    if (computes(order) && known_by(order, steps_) == sums_.window()) sums_.pass_window();
  }
  if (ahead_) pause_and_rejoin();
  if (finished) state_.refusal.stands = false;
  if (state_.fenced) {
    if (finished) forget_finished();
    if (ahead_ && state_.running.empty()) {  // no batch was scheduled behind
      state_.planned.turns.clear();
      --state_.counts.scheduled;
    }
    if (state_.offloads) host_.offload_after_step(end_ns);
  }
  // A full block does not change the counts, unless it is offloaded at once and evicts others on the host.
  const bool below = state_.tiers && host_.changed_below();
  const bool named = state_.grouped != nullptr && !due_.empty();
  if (named || finished || sealed || below || state_.token_log.wants_sample()) {
    host_.sample(running(), end_ns);
  }
  state_.announcer.release(state_.clock.now_ns);
  if (sealed && state_.refusal.stands) {
    state_.refusal.stands = false;  // a sealed block may be the one the head of the queue lacks, or have freed one
    if (state_.waiting.candidate()) return false;
  }
  if (finished && state_.offloads) return false;  // the finished request may have blocks to store
  return !finished || (!stop_on_finish_ && !state_.waiting.candidate());
}

// All members wait: advance to the next landing, if it is in time and the queue has nothing to decide.
bool FastForward::wait_for_landing() {
  TransferHub& hub = state_.tiers->hub();
  const std::optional<std::int64_t> wake = hub.next_wake_ns();
  if (state_.waiting.candidate() || !wake || *wake >= until_ns_) return false;
  state_.announcer.release(clock_.now_ns);
  clock_.now_ns = std::max(clock_.now_ns, *wake);
  hub.run_until(*wake);
  host_.notice_landings(clock_.now_ns);
  return true;
}

}  // namespace understudy
