#include "engine/vllm/leap.hpp"

#include <algorithm>
#include <exception>
#include <functional>

namespace understudy {

// Every running request decodes or waits for room, and nobody can be admitted until one of them ends.
bool VllmEngine::can_leap() const {
  if (shared_ && tiers_) return false;  // sealed blocks go down a step later than a leap would send them
  // Requests are settled where a leap ends, not after each step.
  if (config_.check || bursts_.on() || config_.speculation.tokens > 0) return false;
  if (in_step_ || running_.empty() || running_.size() > config_.max_num_batched_tokens) return false;
  if (config_.async_scheduling) return can_leap_ahead();
  if (tiers_ && (leap_taken_ns_ == now_ns_ || head_may_move() || tiers_->asks_user_after_steps())) return false;
  if (!waiting_.empty() && !blocked_.valid && running_.size() < max_running() &&
      running_.size() < config_.max_num_batched_tokens) {
    return false;
  }
  return std::ranges::all_of(running_,
                             [this](RequestSlot id) { return decodes(id) || (tiers_ && tiers_->waiting(id)); });
}

// The same with a batch planned, which must be of everybody's next token.
bool VllmEngine::can_leap_ahead() const {
  if (shared_ || tiers_ || planned_.turns.size() != running_.size()) return false;
  if (!waiting_.empty() && !blocked_.valid && running_.size() < max_running()) return false;
  return std::ranges::equal(planned_.turns, running_, [this](const Scheduled& turn, RequestSlot slot) {
    return turn.slot == slot && live(turn) && turn.samples && turn.tokens == 1 && !requests_[slot].tokens.empty();
  });
}

bool VllmEngine::decodes(RequestSlot id) const noexcept {
  const EngineRequest& r = requests_[id];
  return r.computed + 1 == r.known && r.computed >= r.spec.prompt_tokens && !r.tokens.empty();
}

std::uint32_t VllmEngine::outputs_left(const EngineRequest& request) const noexcept {
  return std::min(request.spec.outputs() - request.outputs(), config_.max_model_len - request.known);
}

// Begins as a step does.
bool VllmEngine::leap(std::int64_t until_ns, bool stop_on_finish) {
  sleeping_ = false;
  if (tiers_) {
    tiers_->hub().run_until(now_ns_);
    notice_landings(now_ns_);
    show_events(now_ns_);
  }
  return Leap(*this, until_ns, stop_on_finish).play();
}

VllmEngine::Leap::Leap(VllmEngine& engine, std::int64_t until_ns, bool stop_on_finish)
    : engine_(engine),
      scratch_(engine.leap_),
      size_(engine.config_.block_size),
      ahead_(engine.config_.async_scheduling),
      until_ns_(until_ns),
      stop_on_finish_(stop_on_finish),
      base_(engine.token_log_.next_step()) {
  scratch_.members = engine.running_;
  scratch_.since.assign(scratch_.members.size(), 0);
  scratch_.last.resize(scratch_.members.size());
  scratch_.out.assign(scratch_.members.size(), 0);
  scratch_.turns.clear();
  scratch_.paused.clear();
  for (std::uint32_t order = 0; order < scratch_.members.size(); ++order) {
    if (engine.tiers_ && engine.tiers_->waiting(scratch_.members[order])) {
      scratch_.out[order] = 1;
      scratch_.paused.push_back(order);
    } else {
      enter(order);
    }
  }
}

bool VllmEngine::Leap::play() {
  std::exception_ptr failure;  // of a policy of the user's: the steps before it stand
  try {
    play_steps();
  } catch (...) {
    failure = std::current_exception();
    engine_.release_events(engine_.now_ns_);
  }
  for (std::uint32_t order = 0; order < scratch_.members.size(); ++order) {
    if (scratch_.out[order] == 0) settle(order);
  }
  std::erase_if(engine_.running_,
                [this](RequestSlot id) { return engine_.requests_[id].status == RequestStatus::Finished; });
  if (steps_ > 0) engine_.fruitless_preemptions_ = 0;
  if (ahead_) plan_next();
  if (failure) std::rethrow_exception(failure);
  return steps_ > 0;
}

// The batch behind the last step that was played, as stepping would have scheduled it.
void VllmEngine::Leap::plan_next() {
  Batch& next = engine_.planned_;
  next.turns.clear();
  for (const RequestSlot slot : engine_.running_) {
    const EngineRequest& member = engine_.requests_[slot];
    next.turns.push_back({slot, 1, member.computed - 1, true, member.id});
  }
  next.load = {0, 0, 0, alive_, context_};
  next.duration_ns = Batch::kUnknown;
}

void VllmEngine::Leap::play_steps() {
  while (running() > 0) {
    if (engine_.token_log_.crowded()) engine_.fold_token_log();
    if (engine_.tiers_ && (engine_.leap_disturbed() || !resume_paused())) return;
    if (alive_ == 0) {
      if (sleep()) continue;
      engine_.leap_taken_ns_ = engine_.now_ns_;  // what follows is no new step
      return;
    }
    const std::uint64_t turn = scratch_.turns.front().step;
    if (turn > steps_ ? !play_plain_steps(turn) : !play_turns()) return;
  }
}

// ── Members ──

std::uint32_t VllmEngine::Leap::computed_by(std::uint32_t order, std::uint64_t step) const {
  return static_cast<std::uint32_t>(request(order).computed + (step - scratch_.since[order]));
}

bool VllmEngine::Leap::lacks_block(std::uint32_t order, std::uint32_t computed) const {
  return computed % size_ == 0 && request(order).table.size() * size_ <= computed;
}

void VllmEngine::Leap::enter(std::uint32_t order) {
  scratch_.since[order] = steps_;
  scratch_.last[order] = steps_ + engine_.outputs_left(request(order)) - 1;
  scratch_.out[order] = 0;
  context_ += request(order).known;
  ++alive_;
  push_turn(order, steps_);
}

void VllmEngine::Leap::push_turn(std::uint32_t order, std::uint64_t from) {
  const std::uint32_t into = computed_by(order, from) % size_;
  // A step ahead, the block that is filled has its key when the next is begun: in one turn.
  const std::uint64_t block = into == 0 ? from : from + (size_ - (ahead_ ? 0 : 1) - into);
  scratch_.turns.push_back({std::min(block, scratch_.last[order]), order});
  std::ranges::push_heap(scratch_.turns, std::greater<>());
}

// Its request learns of the steps so far.
void VllmEngine::Leap::settle(std::uint32_t order) {
  EngineRequest& member = request(order);
  const std::uint64_t first = base_ + scratch_.since[order];
  const auto played = static_cast<std::uint32_t>(steps_ - scratch_.since[order]);
  member.computed += played;
  member.known += played;
  member.record.output_tokens += played;
  if (played > 0) engine_.effects_.tokens.push_back({member.id, played});
  if (member.tokens.back().first_step + member.tokens.back().count == first) {
    member.tokens.back().count += played;
  } else if (played > 0) {
    member.tokens.push_back({first, played});
  }
  scratch_.since[order] = steps_;
}

void VllmEngine::Leap::pause(std::uint32_t order) {
  settle(order);
  scratch_.out[order] = 1;
  context_ -= request(order).known;
  --alive_;
  scratch_.paused.push_back(order);
}

// The blocks of its turn: one that it begins, one that it fills. False: it must wait for the first.
bool VllmEngine::Leap::serve(std::uint32_t order) {
  const RequestSlot id = scratch_.members[order];
  if (begins_block(order) && engine_.take_blocks(id, 1, engine_.begun_ns_) != Room::Taken) return false;
  const std::uint32_t filled = filled_by(order, steps_);
  if (engine_.shared_ || filled % size_ != 0 || (ahead_ && scratch_.last[order] == steps_)) return true;
  key_block(order, filled / size_);
  return true;
}

void VllmEngine::Leap::key_block(std::uint32_t order, std::uint32_t full) {
  EngineRequest& member = request(order);
  if (!engine_.config_.enable_prefix_caching || member.keyed == full) return;
  engine_.need_identities(member, full);
  engine_.store_.commit(0, std::span<SlotId>(member.table).subspan(full - 1, 1),
                        std::span<const BlockIdentity>(member.blocks).subspan(full - 1, 1));
  member.keyed = full;
  if (engine_.tiers_) {
    scratch_.filled.push_back({scratch_.members[order], 1, full * size_ - 1, true, member.id});
  }
}

// Asynchronously a step schedules the token after the one that it computes, unless that is the last.
bool VllmEngine::Leap::begins_block(std::uint32_t order) const {
  return (!ahead_ || scratch_.last[order] > steps_) && lacks_block(order, computed_by(order, steps_));
}

// ── Steps ──

std::int64_t VllmEngine::Leap::step_ns() const {
  return engine_.timing_.duration_ns({0, 0, 0, alive_, context_}, engine_.capacity_tokens_);
}

// False: one of them computes a prompt, which takes an ordinary step.
bool VllmEngine::Leap::resume_paused() {
  bool prefills = false;
  std::erase_if(scratch_.paused, [&](std::uint32_t order) {
    const RequestSlot id = scratch_.members[order];
    if (engine_.tiers_->waiting(id)) return false;
    prefills = prefills || !engine_.decodes(id);
    if (!prefills) enter(order);
    return !prefills;
  });
  return !prefills;
}

// Up to the next turn, or until something has landed. False: time is up.
bool VllmEngine::Leap::play_plain_steps(std::uint64_t until_step) {
  // Copies, which stay in registers.
  const std::uint64_t alive = alive_;
  std::uint64_t steps = steps_;
  std::uint64_t context = context_;
  std::int64_t now_ns = engine_.now_ns_;
  bool in_time = true;
  bool disturbed = false;
  std::exception_ptr failure;  // of a timing model of the user's
  while (steps < until_step && !disturbed) {
    std::int64_t end_ns = now_ns;
    try {
      end_ns += engine_.timing_.duration_ns({0, 0, 0, alive, context}, engine_.capacity_tokens_);
    } catch (...) {
      failure = std::current_exception();
      break;
    }
    in_time = now_ns < until_ns_ && end_ns <= until_ns_;
    if (!in_time) break;
    now_ns = engine_.now_ns_ = end_ns;
    ++steps;
    engine_.token_log_.end_step(end_ns);
    context += alive;
    if (engine_.tiers_ && engine_.tiers_->hub().due(end_ns)) {
      disturbed = engine_.leap_disturbed() || !scratch_.paused.empty();
    }
    if (engine_.token_log_.wants_sample()) engine_.sample(running());
  }
  engine_.totals_.steps += steps - steps_;
  steps_ = steps;
  context_ = context;
  if (failure) std::rethrow_exception(failure);
  return in_time;
}

// A step in which somebody has a turn. False: it is for an ordinary one, or nothing may follow.
bool VllmEngine::Leap::play_turns() {
  std::int64_t end_ns = engine_.now_ns_ + step_ns();
  if (engine_.now_ns_ >= until_ns_ || end_ns > until_ns_) return false;
  const std::uint64_t fresh = gather_due();
  // A hit that the head of the queue has been waiting for, or a preemption.
  if (ordinary_ || fresh > engine_.store_.available(0)) return false;
  engine_.begun_ns_ = engine_.now_ns_;
  engine_.step_holds_events_ = true;
  scratch_.filled.clear();
  const bool at_once = fresh == 0 || engine_.leap_has_room(fresh);
  if (!at_once) {
    // The head may go on the room that this makes.
    if (!engine_.waiting_.empty() && !engine_.tiers_->waiting(engine_.waiting_.head())) return false;
    std::erase_if(scratch_.due, [this](std::uint32_t order) {
      if (serve(order)) return false;
      pause(order);
      return true;
    });
    if (alive_ == 0 && sleep()) return true;
    engine_.leap_taken_ns_ = engine_.now_ns_;  // what follows is no new step
    end_ns = engine_.now_ns_ + step_ns();
    if (alive_ == 0 || end_ns > until_ns_ || engine_.head_may_move()) return false;
    engine_.leap_taken_ns_ = -1;
    engine_.show_events(engine_.now_ns_);  // what went on the host
  }
  engine_.now_ns_ = end_ns;
  scratch_.done.clear();
  for (const std::uint32_t order : scratch_.due) {
    if (at_once) (void)serve(order);
    if (scratch_.last[order] == steps_) {
      scratch_.done.push_back(order);
    } else {
      push_turn(order, steps_ + 1);
    }
  }
  return end_step(fresh);
}

// Who has a turn now; returns how many of them need a block.
std::uint64_t VllmEngine::Leap::gather_due() {
  const Blocked& blocked = engine_.blocked_;
  const bool wants_key =
      !engine_.shared_ && blocked.valid && blocked.wants_key && engine_.config_.enable_prefix_caching;
  std::uint64_t fresh = 0;
  ordinary_ = false;
  scratch_.due.clear();
  while (!scratch_.turns.empty() && scratch_.turns.front().step == steps_) {
    const std::uint32_t order = scratch_.turns.front().order;
    std::ranges::pop_heap(scratch_.turns, std::greater<>());
    scratch_.turns.pop_back();
    scratch_.due.push_back(order);
    // It ends before its limit, which the scheduler does not know: the batch behind has it too.
    const RequestSpec& spec = request(order).spec;
    ordinary_ = ordinary_ || (ahead_ && scratch_.last[order] == steps_ && spec.outputs() < spec.max_tokens);
    fresh += begins_block(order) ? 1 : 0;
    const std::uint32_t filled = filled_by(order, steps_);
    if (!wants_key || filled % size_ != 0) continue;
    engine_.need_identities(request(order), filled / size_);
    ordinary_ = ordinary_ || request(order).blocks[filled / size_ - 1].lineage == blocked.missing;
  }
  // Only multi_lru may evict a block before those that continue it. Then the head of the queue finds less, so less
  // has to be held for it, and it may fit.
  if (engine_.shared_ && engine_.config_.eviction_policy == PolicyKind::MultiLru && blocked.valid && fresh > 0) {
    ordinary_ = true;
  }
  return fresh;
}

// Tokens are visible, and who has its last one is gone. False: the queue, or the caller, has to see to it.
bool VllmEngine::Leap::end_step(std::uint64_t fresh) {
  const std::int64_t end_ns = engine_.now_ns_;
  ++steps_;
  if (engine_.tiers_) {
    engine_.tiers_->hub().run_until(end_ns);
    engine_.write_through(scratch_.filled, end_ns);
  }
  ++engine_.totals_.steps;
  engine_.token_log_.end_step(end_ns);
  bool sealed = false;
  // Under kvbm, tokens are received in turn: a block is sealed, or a request ends, before the next one's.
  for (const std::uint32_t order : engine_.shared_ ? scratch_.due : scratch_.done) {
    const std::uint32_t computed = computed_by(order, steps_);
    if (ahead_ && filled_by(order, steps_ - 1) % size_ == 0) key_block(order, filled_by(order, steps_ - 1) / size_);
    if (engine_.shared_ && computed % size_ == 0) {
      engine_.seal_blocks(request(order), computed / size_);
      sealed = true;
    }
    if (scratch_.last[order] + 1 != steps_) continue;
    settle(order);
    context_ -= request(order).known - 1;  // what it added to the context of this step
    engine_.retire(request(order));
    scratch_.out[order] = 1;
    engine_.complete(scratch_.members[order], end_ns);
  }
  const bool finished = !scratch_.done.empty();
  alive_ -= scratch_.done.size();
  context_ += alive_;
  if (finished) engine_.blocked_.valid = false;
  // A block that is full counts as it did; on the host it may push others out.
  if (fresh > 0 || finished || sealed || engine_.tiers_ || engine_.token_log_.wants_sample()) engine_.sample(running());
  engine_.close_step();
  if (sealed && engine_.blocked_.valid) {
    engine_.blocked_.valid = false;  // what was sealed may be what the head of the queue lacks, or have freed a block
    if (!engine_.waiting_.empty()) return false;
  }
  return !finished || (!stop_on_finish_ && engine_.waiting_.empty());
}

// Everybody waits: on to the next landing, if that is in time and the queue has nothing to decide.
bool VllmEngine::Leap::sleep() {
  TransferHub& hub = engine_.tiers_->hub();
  const std::optional<std::int64_t> wake = hub.next_wake_ns();
  if (!engine_.waiting_.empty() || !wake || *wake >= until_ns_) return false;
  engine_.release_events(engine_.now_ns_);
  hub.run_until(*wake);
  engine_.now_ns_ = std::max(engine_.now_ns_, *wake);
  engine_.notice_landings(engine_.now_ns_);
  return true;
}

}  // namespace understudy
