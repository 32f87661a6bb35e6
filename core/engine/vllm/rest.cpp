// Resting: steps that concern nobody outside are not played before somebody has to know.
#include <algorithm>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/leap.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kFewestAtRest = 2;
constexpr std::uint64_t kMostAtRest = 4096;

}  // namespace

// How many of the next steps concern nobody outside before the last of them ends: all that run get a token, and no
// block is copied or looked up below the device. At the end of the last one somebody may end, or a block that is full
// go down. Nobody can be admitted in them, where a leap is possible.
std::uint64_t VllmEngine::steps_to_rest() const {
  const std::uint32_t size = config_.block_size;
  const bool through = tiers_->config().mode == OffloadMode::WriteThrough;
  // A full block may be what the head of the queue waits for: it is found when the step begins.
  const bool stops_before_full = refusal_.stands && refusal_.wants_block && !waiting_.empty();
  if (config_.async_scheduling && planned_.turns.size() != running_.size()) return 0;  // who waited joins in the next
  std::uint64_t steps = kMostAtRest;
  std::uint64_t to_next_block = kMostAtRest;
  for (const RequestSlot id : running_) {
    if (tiers_->waiting(id)) return 0;
    const EngineRequest& request = requests_[id];
    const std::uint32_t into = request.computed % size;
    const bool lacks_block = request.table.size() * std::uint64_t{size} <= request.computed;
    steps = std::min<std::uint64_t>(steps, outputs_left(request));
    // A step ahead, a block that is full has its name in the step that computes its last token.
    const std::uint32_t to_full = config_.async_scheduling ? (size - into) % size : size - 1 - into;
    if (stops_before_full || through) steps = std::min<std::uint64_t>(steps, to_full + (stops_before_full ? 0 : 1));
    to_next_block = std::min<std::uint64_t>(to_next_block, into == 0 && lacks_block ? 0 : size - into);
  }
  if (steps <= to_next_block) return steps;
  std::uint64_t blocks = 0;
  for (const RequestSlot id : running_) {
    const std::uint64_t end = requests_[id].computed + steps;
    blocks += (end + size - 1) / size - std::min<std::uint64_t>(requests_[id].table.size(), (end + size - 1) / size);
  }
  return leap_->has_room(blocks) ? steps : to_next_block;
}

std::optional<std::int64_t> VllmEngine::rest(std::int64_t now_ns) {
  if (!leaping_ || !tiers_ || tiers_->has_ready() || !leap_->possible()) return std::nullopt;
  const std::uint64_t steps = steps_to_rest();
  if (steps < kFewestAtRest) return std::nullopt;
  DecodeSums sums(*timing_.model);
  std::vector<std::uint64_t> passing;  // after how many steps somebody's context is the window
  for (const RequestSlot id : running_) {
    const std::uint64_t known = requests_[id].known;
    sums.add(known);
    if (known < sums.window() && sums.window() - known < steps) passing.push_back(sums.window() - known);
  }
  std::ranges::sort(passing);
  // Where nobody can say what a step takes, or it may take nothing, steps are played in their order.
  const std::uint64_t mean = sums.load().context_tokens / sums.requests();
  if (timing_.least_ns(sums.load(), mean, capacity_tokens_) <= 0) return std::nullopt;
  landing_wait_.on = false;
  read_input(now_ns);
  now_ns_ = now_ns;
  rested_step_ns_ = now_ns + timing_.duration_ns(sums.load(), capacity_tokens_);
  std::int64_t end_ns = now_ns;
  std::uint64_t done = 0;
  for (const std::uint64_t step : passing) {
    end_ns += sums.duration_ns(step - done, timing_, capacity_tokens_);
    sums.grow(step - done);
    sums.pass_window();
    done = step;
  }
  return end_ns + sums.duration_ns(steps - done, timing_, capacity_tokens_);
}

const StepEffects& VllmEngine::catch_up(std::int64_t now_ns, bool landing) {
  new_effects();
  catching_up_ = true;
  try {
    play(landing ? now_ns - 1 : now_ns, false, Last::Open);
    if (landing && !in_step_) (void)begin_step(now_ns_);
  } catch (...) {
    catching_up_ = false;
    throw;
  }
  catching_up_ = false;
  return hand_out();
}

const StepEffects& VllmEngine::rest_on(std::int64_t now_ns) {
  new_effects();
  if (rested_step_ns_ >= now_ns) return hand_out();
  catching_up_ = true;
  try {
    play(now_ns - 1, false, Last::Lazy);
  } catch (...) {
    catching_up_ = false;
    throw;
  }
  catching_up_ = false;
  rested_step_ns_ = in_step_ ? now_ns_ : now_ns_ + leap_->step_of_all_ns();
  return hand_out();
}

}  // namespace understudy
