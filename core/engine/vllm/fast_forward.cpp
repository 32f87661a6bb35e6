#include "engine/vllm/fast_forward.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <numeric>
#include <span>

namespace understudy {

// Begins as a step does.
bool VllmEngine::FastForward::play(std::int64_t until_ns, bool stop_on_finish, bool through) {
  engine_.finish_bound_.reset();
  engine_.read_input(engine_.now_ns_);
  engine_.landing_wait_.on = false;
  if (engine_.tiers_) {
    engine_.tiers_->hub().run_until(engine_.now_ns_);
    engine_.notice_landings(engine_.now_ns_);
    engine_.announcer_.show(engine_.now_ns_);
  }
  start(until_ns, stop_on_finish, through);
  std::exception_ptr failure;  // from a user-defined policy: the steps before it are valid
  try {
    play_steps();
  } catch (...) {
    failure = std::current_exception();
    // Blocks that the current step would have completed are not computed.
    for (const Scheduled& turn : filled_) engine_.kv_->withdraw(engine_.requests_[turn.slot], false);
    engine_.announcer_.release(engine_.now_ns_);
  }
  update_requests();
  if (failure) std::rethrow_exception(failure);
  return steps_ > 0;
}

// Write the result of the finished fast-forward to all requests.
void VllmEngine::FastForward::update_requests() {
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (order + 1 < members_.size()) request(order + 1).warm();
    if (computes(order)) update_request(order);
  }
  forget_finished();
  if (steps_ > 0) engine_.fruitless_preemptions_ = 0;
  if (ahead_) plan_next();
}

void VllmEngine::FastForward::forget_finished() {
  std::erase_if(engine_.running_,
                [this](RequestSlot id) { return engine_.requests_[id].status == RequestStatus::Finished; });
}

void VllmEngine::FastForward::start(std::int64_t until_ns, bool stop_on_finish, bool through) {
  ahead_ = engine_.config_.async_scheduling;
  names_on_receipt_ = engine_.kv_->names_on_receipt();
  until_ns_ = std::min(until_ns, kLatestNs);  // past kLatestNs an ordinary step throws
  stop_on_finish_ = stop_on_finish;
  through_ = through;
  base_ = engine_.token_log_.next_step();
  steps_ = counted_ = 0;
  sums_ = DecodeSums(*engine_.timing_.model);
  predicted_.known = 0;
  ordinary_ = out_of_time_ = false;
  filled_.clear();
  members_ = engine_.running_;
  since_.assign(members_.size(), 0);
  last_.resize(members_.size());
  out_.assign(members_.size(), kOut);
  events_.clear();
  paused_.clear();
  rejoining_.clear();
  const std::vector<Scheduled>& planned = engine_.planned_.turns;
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    const bool in = ahead_ ? sums_.requests() < planned.size() && planned[sums_.requests()].slot == members_[order]
                           : !engine_.tiers_ || !engine_.tiers_->waiting(members_[order]);
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
void VllmEngine::FastForward::plan_next() {
  if (engine_.offload_) count_schedules();
  Batch& next = engine_.planned_;
  next.turns.clear();
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (!computes(order)) continue;
    EngineRequest& member = request(order);
    member.last_step = engine_.scheduled_steps_;
    next.turns.push_back({members_[order], 1, member.computed - 1, true, member.id});
  }
  next.load = StepLoad::of(sums_.load());
  next.duration_ns = Batch::kUnknown;
}

// Each executed step scheduled the one behind it, and freed the blocks whose release was deferred to it.
void VllmEngine::FastForward::count_schedules() {
  engine_.scheduled_steps_ += steps_ - counted_;
  engine_.processed_steps_ += steps_ - counted_;
  counted_ = steps_;
}

void VllmEngine::FastForward::play_steps() {
  while (running() > 0) {
    if (engine_.token_log_.crowded()) engine_.fold_token_log();
    // A step ahead, no batch is planned once all requests wait.
    if (engine_.tiers_ && (interrupted() || (ahead_ && sums_.requests() == 0) || !resume_paused())) return;
    if (sums_.requests() == 0) {
      if (wait_for_landing()) continue;
      begun_ns_ = engine_.now_ns_;  // the next step has begun already
      return;
    }
    const std::uint64_t turn = events_.front().step;
    if (turn > steps_ ? !play_plain_steps(turn) : !play_events()) return;
  }
}

// ── Steps ──

// Between two steps: whether something has landed that an ordinary step must decide on.
bool VllmEngine::FastForward::interrupted() {
  engine_.announcer_.hold();  // the transfer landed in the middle of a step
  engine_.tiers_->hub().run_until(engine_.now_ns_);
  engine_.announcer_.stop_holding();
  engine_.notice_landings(engine_.now_ns_);
  if (engine_.offload_links_ && engine_.offload_links_->has_done()) return true;
  return engine_.tiers_->has_ready() || engine_.head_may_move();
}

std::int64_t VllmEngine::FastForward::step_ns() const {
  if (const auto known = predicted(steps_, sums_.load()); !known.empty()) return known.front();
  return engine_.timing_.duration_ns(sums_.load(), engine_.capacity_tokens_);
}

// Run steps up to the next event of a member, or until a transfer lands. False: time is up.
bool VllmEngine::FastForward::play_plain_steps(std::uint64_t until_step) {
  // Copies, which stay in registers.
  DecodeSums sums = sums_;
  std::uint64_t steps = steps_;
  std::int64_t now_ns = engine_.now_ns_;
  std::int64_t begun_ns = engine_.begun_ns_;
  const std::int64_t from_ns = now_ns;
  const StepTiming& timing = engine_.timing_;
  const bool covered = timing.model->covers(sums.after(until_step - steps));
  bool stop = false;
  std::exception_ptr failure;  // from a user-defined timing model
  std::array<std::int64_t, StepTiming::kMostAtOnce> room;
  while (steps < until_step && !stop && !out_of_time_) {
    std::span<std::int64_t> durations_ns =
        std::span(room).first(std::min<std::uint64_t>(until_step - steps, room.size()));
    if (const auto known = predicted(steps, sums.load()); !known.empty()) {
      durations_ns = durations_ns.first(std::min(known.size(), durations_ns.size()));
      std::copy_n(known.begin(), durations_ns.size(), durations_ns.begin());
    } else {
      try {
        durations_ns = durations_ns.first(timing.next_steps_ns(sums.load(), engine_.capacity_tokens_, durations_ns));
      } catch (...) {
        failure = std::current_exception();
        break;
      }
    }
    const auto lands = [&] {
      return engine_.tiers_->hub().due(std::accumulate(durations_ns.begin(), durations_ns.end(), now_ns));
    };
    if (covered && !engine_.token_log_.wants_sample() && !(engine_.tiers_ && lands())) {
      // Time passes, and nothing else.
      const std::span<const std::int64_t> ends_ns = ends_in_time(durations_ns, now_ns);
      if (!ends_ns.empty()) {
        begun_ns = ends_ns.size() > 1 ? ends_ns[ends_ns.size() - 2] : now_ns;
        now_ns = engine_.now_ns_ = ends_ns.back();
      }
      engine_.token_log_.end_steps(ends_ns);
      steps += ends_ns.size();
      sums.grow(ends_ns.size());
      continue;
    }
    for (const std::int64_t duration_ns : durations_ns) {
      const std::int64_t end_ns = now_ns + duration_ns;
      out_of_time_ = !in_time(now_ns, end_ns);
      if (out_of_time_ || stop) break;
      if (!covered && !timing.model->covers(sums.load())) engine_.totals_.uncovered_ns += duration_ns;
      begun_ns = now_ns;
      now_ns = engine_.now_ns_ = end_ns;
      ++steps;
      engine_.token_log_.end_step(end_ns);
      sums.grow();
      if (engine_.tiers_ && engine_.tiers_->hub().due(end_ns)) {
        stop = interrupted() || !paused_.empty();
        if (engine_.offload_links_ && engine_.offload_links_->has_done()) {
          engine_.announcer_.hold();
          engine_.report_offload(engine_.offload_links_->take_done());
          engine_.announcer_.release(end_ns);
          engine_.sample(running());
          continue;
        }
      }
      if (engine_.token_log_.wants_sample()) engine_.sample(running());
    }
  }
  engine_.begun_ns_ = begun_ns;
  engine_.totals_.steps += steps - steps_;
  engine_.totals_.step_ns += now_ns - from_ns;
  steps_ = steps;
  sums_ = sums;
  if (failure) std::rethrow_exception(failure);
  return !out_of_time_;
}

// Steps of these durations, the first of which begins now: the ends of those that are in time, in their place.
std::span<const std::int64_t> VllmEngine::FastForward::ends_in_time(std::span<std::int64_t> durations_ns,
                                                                    std::int64_t now_ns) {
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
bool VllmEngine::FastForward::play_events() {
  std::int64_t end_ns = engine_.now_ns_ + step_ns();
  out_of_time_ = !in_time(engine_.now_ns_, end_ns);
  if (out_of_time_) return false;
  const std::uint64_t fresh = gather_due();
  // A hit that the head of the queue has been waiting for, or a preemption.
  if (ordinary_ || fresh > engine_.kv_->available()) return false;
  engine_.begun_ns_ = engine_.now_ns_;
  const bool at_once = fresh == 0 || has_room(fresh);
  if (!at_once) {
    if (!head_stays()) return false;
    serve_or_pause();
    if (sums_.requests() == 0 && wait_for_landing()) return true;
    begun_ns_ = engine_.now_ns_;  // the next step has begun already
    end_ns = engine_.now_ns_ + step_ns();
    if (sums_.requests() == 0 || !in_time(engine_.now_ns_, end_ns) || engine_.head_may_move()) return false;
    begun_ns_ = -1;
    engine_.announcer_.show(engine_.now_ns_);  // publish evictions to the host
  }
  engine_.announcer_.hold();
  engine_.now_ns_ = end_ns;
  apply_events(!at_once);
  return end_step(fresh);
}

// Whether the head of the queue stays queued. If not, it may use room made by a block that leaves the device.
bool VllmEngine::FastForward::head_stays() const {
  return engine_.waiting_.empty() || engine_.tiers_->waiting(engine_.waiting_.head()) || engine_.head_lacks_room();
}

void VllmEngine::FastForward::serve_or_pause() {
  engine_.announcer_.hold();
  std::erase_if(due_, [this](std::uint32_t order) {
    if (serve(order)) return false;
    if (!ahead_) pause(order);
    // The member has a token in the current batch, and none in the one behind it.
    if (ahead_) out_[order] = out_[order] == kRejoining ? kOut : kPausing;
    return out_[order] == kOut;
  });
}

void VllmEngine::FastForward::apply_events(bool served) {
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
std::uint64_t VllmEngine::FastForward::gather_due() {
  const Refusal& refusal = engine_.refusal_;
  const bool wants_block = refusal.stands && refusal.wants_block && !names_on_receipt_;
  std::uint64_t fresh = 0;
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
    fresh += begins_block(order) ? 1 : 0;
    const std::uint32_t filled = filled_by(order, steps_);
    if (!wants_block || filled % size_ != 0) continue;
    engine_.kv_->need_names(request(order), filled / size_);
    ordinary_ = ordinary_ || request(order).blocks[filled / size_ - 1].lineage == refusal.missing;
  }
  return fresh;
}

// Publish tokens and retire finished requests. False: the queue or the caller has to act.
bool VllmEngine::FastForward::end_step(std::uint64_t fresh) {
  const std::int64_t end_ns = engine_.now_ns_;
  if (engine_.tiers_) {
    engine_.tiers_->hub().run_until(end_ns);  // may fail: then there was no such step
    if (!engine_.offload_) engine_.write_through(filled_, end_ns);
  }
  ++steps_;
  ++engine_.totals_.steps;
  engine_.token_log_.end_step(end_ns);
  engine_.count_time(sums_.load(), end_ns - engine_.begun_ns_);
  if (ahead_ && engine_.offload_) {
    count_schedules();
    for (const std::uint32_t order : done_) request(order).last_step = engine_.processed_steps_;
  }
  bool sealed = false;
  bool finished = false;
  // Where blocks are named when their tokens arrive, tokens arrive in order: each request seals its block or ends
  // before the next one's token.
  for (const std::uint32_t order : names_on_receipt_ ? due_ : done_) {
    const std::uint32_t computed = computed_by(order, steps_);
    if (ahead_ && filled_by(order, steps_ - 1) % size_ == 0) name_filled(order, filled_by(order, steps_ - 1) / size_);
    if (names_on_receipt_ && computed % size_ == 0) {
      engine_.kv_->name(request(order), computed / size_);
      sealed = true;
    }
    if (last_[order] + 1 != steps_) continue;
    finished = true;
    update_request(order);
    sums_.remove(request(order).known - 1);  // its share of this step's context
    engine_.retire(request(order), false, end_ns);
    out_[order] = kOut;
    engine_.complete(members_[order], end_ns);
  }
  filled_.clear();
  if (finished) find_longest(steps_ - 1);
  sums_.grow();
  for (const std::uint32_t order : due_) {
    if (computes(order) && known_by(order, steps_) == sums_.window()) sums_.pass_window();
  }
  if (ahead_) pause_and_rejoin();
  if (finished) engine_.refusal_.stands = false;
  if (finished && open_) forget_finished();
  if (engine_.offload_links_) {
    if (finished) forget_finished();
    if (ahead_ && engine_.running_.empty()) {  // no batch was scheduled behind
      engine_.planned_.turns.clear();
      --engine_.scheduled_steps_;
    }
    engine_.offload_after_step(end_ns);
  }
  // A full block does not change the counts, unless it is offloaded at once and evicts others on the host.
  const bool below = engine_.tiers_ && (engine_.offload_ || engine_.tiers_->config().mode != OffloadMode::OnEviction ||
                                        engine_.tiers_->landings() != engine_.landings_noticed_);
  if (fresh > 0 || finished || sealed || below || engine_.token_log_.wants_sample()) engine_.sample(running());
  engine_.close_step();
  if (sealed && engine_.refusal_.stands) {
    engine_.refusal_.stands = false;  // a sealed block may be the one the head of the queue lacks, or have freed one
    if (!engine_.waiting_.empty()) return false;
  }
  if (finished && engine_.offload_) return false;  // the finished request may have blocks to store
  return !finished || (!stop_on_finish_ && engine_.waiting_.empty());
}

// All members wait: advance to the next landing, if it is in time and the queue has nothing to decide.
bool VllmEngine::FastForward::wait_for_landing() {
  TransferHub& hub = engine_.tiers_->hub();
  const std::optional<std::int64_t> wake = hub.next_wake_ns();
  if (!engine_.waiting_.empty() || !wake || *wake >= until_ns_) return false;
  engine_.announcer_.release(engine_.now_ns_);
  engine_.now_ns_ = std::max(engine_.now_ns_, *wake);
  hub.run_until(*wake);
  engine_.notice_landings(engine_.now_ns_);
  return true;
}

}  // namespace understudy
