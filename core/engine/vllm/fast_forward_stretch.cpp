// Deferred steps: a fast-forward that stays open; its external effects happen at their own times.
#include <algorithm>
#include <numeric>

#include "engine/vllm/fast_forward.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kMostSteps = 4096;

}  // namespace

void FastForward::open_stretch() {
  start(Effects::kNever, false, false);
  open_ = true;
}

void FastForward::close() {
  if (!open_) return;
  open_ = false;
  update_requests();
}

std::optional<std::int64_t> FastForward::next_stretch() {
  if (!can_go_on()) {
    close();
    return std::nullopt;
  }
  const std::uint64_t steps = steps_unobserved();
  if (steps == 0) return begin_step() ? std::optional(clock_.now_ns) : std::nullopt;
  return clock_.now_ns + steps_ns(steps);
}

// Whether the fast-forward may include the next step: the same conditions as `possible` for the first.
bool FastForward::can_go_on() {
  if (running() == 0) return false;
  if (state_.token_log.crowded()) host_.fold_token_log();
  if (interrupted()) return false;
  if (!state_.waiting.empty() && !state_.refusal.stands && state_.running.size() < state_.max_running() &&
      (ahead_ || state_.running.size() < state_.config.max_num_batched_tokens || !paused_.empty())) {
    return false;
  }
  if (sums_.requests() == 0 && ahead_) return false;  // no batch is planned
  if (!resume_paused() || sums_.requests() == 0) return false;
  // Where the duration of a step is unknown, or may be zero, steps run in their order.
  const std::uint64_t mean = sums_.load().context_tokens / sums_.requests();
  return state_.timing.least_ns(sums_.load(), mean, state_.capacity_tokens) > 0;
}

// Count the next steps without external effects before the last of them ends: no block is copied or looked up below the
// device. At the end of the last one a request may finish, or a full block be offloaded. Requests that wait for room
// keep waiting, unless a transfer has landed.
std::uint64_t FastForward::steps_unobserved() const {
  if (ahead_ && !paused_.empty()) return 0;  // waiting members rejoin in the next step
  const bool through = state_.tiers->config().mode == OffloadMode::WriteThrough;
  // The head of the queue may wait for a full block, which it finds when the step begins.
  const bool stops_before_full = state_.refusal.stands && state_.refusal.wants_block && !state_.waiting.empty();
  std::uint64_t steps = kMostSteps;
  for (const MemberEvent& turn : events_) {  // whose end, or full block, is not before it
    const std::uint32_t order = turn.order;
    if (turn.step - steps_ >= steps || !computes(order)) continue;
    const std::uint32_t into = computed_by(order, steps_) % size_;
    steps = std::min(steps, last_[order] + 1 - steps_);
    // A step ahead, a block that is full has its name in the step that computes its last token.
    const std::uint32_t to_full = ahead_ ? (size_ - into) % size_ : size_ - 1 - into;
    if (stops_before_full || through) steps = std::min<std::uint64_t>(steps, to_full + (stops_before_full ? 0 : 1));
  }
  // Cheap upper bound first: most often all members have room for the blocks of that many steps.
  if (state_.has_room(sums_.requests() * ((steps + size_ - 1) / size_))) return steps;
  std::uint64_t to_next_block = kMostSteps;
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (!computes(order)) continue;
    const std::uint32_t computed = computed_by(order, steps_);
    const std::uint32_t into = computed % size_;
    const bool lacks_block = request(order).table.size() * std::uint64_t{size_} <= computed;
    to_next_block = std::min<std::uint64_t>(to_next_block, into == 0 && lacks_block ? 0 : size_ - into);
  }
  if (steps <= to_next_block) return steps;
  std::uint64_t blocks = 0;
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (!computes(order)) continue;
    const std::uint64_t end = (computed_by(order, steps_) + steps + size_ - 1) / size_;
    blocks += end - std::min<std::uint64_t>(request(order).table.size(), end);
  }
  return state_.has_room(blocks) ? steps : to_next_block;
}

// Duration of the next `steps` steps.
std::int64_t FastForward::steps_ns(std::uint64_t steps) {
  const StepTiming& timing = state_.timing;
  if (sums_.window() == TimingModel::kNoWindow) {
    predicted_.first = steps_;
    predicted_.load = sums_.load();
    predicted_.known = 0;
    const std::size_t wanted = std::min<std::uint64_t>(steps, predicted_.durations_ns.size());
    std::size_t known = 0;
    while (known < wanted) {
      const auto some =
          std::span(predicted_.durations_ns).subspan(known, std::min(wanted - known, StepTiming::kMostAtOnce));
      known += timing.next_steps_ns(sums_.after(known), state_.capacity_tokens, some);
    }
    predicted_.known = known;
    DecodeSums later = sums_;
    later.grow(known);
    const auto end = predicted_.durations_ns.begin() + static_cast<std::ptrdiff_t>(known);
    return std::accumulate(predicted_.durations_ns.begin(), end, std::int64_t{0}) +
           later.duration_ns(steps - known, timing, state_.capacity_tokens);
  }
  std::vector<std::uint64_t> passing;  // steps until each context reaches the window
  for (std::uint32_t order = 0; order < members_.size(); ++order) {
    if (!computes(order)) continue;
    const std::uint64_t known = known_by(order, steps_);
    if (known < sums_.window() && sums_.window() - known < steps) passing.push_back(sums_.window() - known);
  }
  std::ranges::sort(passing);
  DecodeSums sums = sums_;
  std::int64_t sum_ns = 0;
  std::uint64_t done = 0;
  for (const std::uint64_t step : passing) {
    sum_ns += sums.duration_ns(step - done, timing, state_.capacity_tokens);
    sums.grow(step - done);
    sums.pass_window();
    done = step;
  }
  return sum_ns + sums.duration_ns(steps - done, timing, state_.capacity_tokens);
}

// Predicted durations from `step` on, if still valid: no request was submitted, finished or cancelled since.
std::span<const std::int64_t> FastForward::predicted(std::uint64_t step, const DecodeLoad& load) const {
  const std::uint64_t passed = step - predicted_.first;  // wraps where it is before
  if (passed >= predicted_.known || load.requests != predicted_.load.requests ||
      load.context_tokens != predicted_.load.context_tokens + passed * load.requests ||
      load.longest_context != predicted_.load.longest_context + passed) {
    return {};
  }
  return std::span(predicted_.durations_ns).first(predicted_.known).subspan(passed);
}

bool FastForward::run_until(std::int64_t until_ns) {
  until_ns_ = until_ns;
  out_of_time_ = false;
  play_steps();
  const bool in_time = out_of_time_ || clock_.now_ns >= until_ns;
  if (!in_time || running() == 0) close();
  return in_time;
}

bool FastForward::begin_step() {
  due_.clear();
  fresh_ = 0;
  bool at_once = true;
  bool ordinary = false;
  if (events_.front().step == steps_) {
    fresh_ = gather_due();
    at_once = fresh_ == 0 || state_.has_room(fresh_);
    ordinary = ordinary_ || fresh_ > state_.kv.available() || (!at_once && !host_.head_stays());
  }
  if (ordinary) {
    close();
    return false;
  }
  clock_.begun_ns = clock_.now_ns;
  if (!at_once) {
    serve_or_pause();
    if (sums_.requests() == 0 || host_.head_may_move()) {
      begun_ns_ = clock_.now_ns;  // the next step has begun already
      close();
      return false;
    }
    state_.announcer.show(clock_.now_ns);  // publish evictions to the host
  }
  state_.announcer.hold();
  clock_.now_ns += step_ns();
  apply_events(!at_once);
  in_step_ = clock_.in_step = true;
  return true;
}

void FastForward::finish_step() {
  in_step_ = clock_.in_step = false;
  (void)end_step(fresh_);
  if (running() == 0) close();
}

}  // namespace understudy
