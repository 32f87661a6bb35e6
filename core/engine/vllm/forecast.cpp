// What can be said of steps that have not been played.
#include <algorithm>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/leap.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kForeseen = 128;  // steps: to time more of them costs more than to look again

}  // namespace

// Every one of them ends with a token of the request, or with several if it speculates.
std::uint64_t VllmEngine::steps_to_finish(const EngineRequest& request) const noexcept {
  const std::uint64_t left = expected_outputs(request) - std::min(request.outputs(), expected_outputs(request));
  const std::uint64_t drafts = std::max<std::uint64_t>(config_.accept_rates.size(), config_.speculation.tokens);
  return std::max<std::uint64_t>(1, drafts == 0 ? left : (left + drafts) / (drafts + 1));
}

// If all that run get a token in each of so many steps, unless somebody comes (there is room for what they add, and
// nobody else who could take it): what a step of theirs decodes now.
std::optional<DecodeSums> VllmEngine::load_if_undisturbed(std::uint64_t steps) const {
  if (running_.empty() || num_waiting() > 0 || parked_ > 0 || loading_ > 0 || bursts_.on() ||
      config_.speculation.tokens > 0 || running_.size() > config_.max_num_batched_tokens) {
    return std::nullopt;
  }
  const bool ahead = config_.async_scheduling;  // by a step, and a token
  if (ahead && !leap_->plans_next_tokens()) return std::nullopt;
  std::uint64_t blocks = 0;
  DecodeSums sums(*timing_.model);
  for (const RequestSlot id : running_) {
    const EngineRequest& request = requests_[id];
    if (request.spec.max_tokens == 0) return std::nullopt;
    if (!ahead && request.computed + (in_step_ ? 0 : 1) != request.known) return std::nullopt;
    if (request.computed < request.spec.prompt_tokens) return std::nullopt;  // the last token of a prompt is no decode
    if (tiers_ && tiers_->waiting(id)) return std::nullopt;
    sums.add(request.known);
    const std::uint64_t room = request.table.size() * std::uint64_t{config_.block_size};
    const std::uint64_t end = request.known + steps + (ahead ? 1 : 0);
    if (end > room) blocks += (end - room + config_.block_size - 1) / config_.block_size;
  }
  return leap_->has_room(blocks) ? std::optional(sums) : std::nullopt;
}

std::int64_t VllmEngine::no_finish_before() const {
  if (idle() && !in_step_) return kNever;
  std::int64_t from_ns = now_ns_;
  if (!in_step_ && landing_wait_.on && !landing_wait_over()) {
    from_ns = std::max(from_ns, tiers_->hub().next_wake_ns().value_or(from_ns));
  }
  // The step that is open may be the first of them.
  const auto after = [&](std::uint64_t steps, std::int64_t step_ns) {
    if (in_step_) --steps;
    const std::int64_t most = (kNever - from_ns) / std::max<std::int64_t>(step_ns, 1);
    return from_ns + std::min(static_cast<std::int64_t>(std::min<std::uint64_t>(steps, 1u << 31)), most) * step_ns;
  };
  const std::uint64_t window = timing_.model->window();
  std::uint64_t fewest = kNever;
  std::uint64_t passes = window;  // after how many somebody's context is the window
  for (const RequestSlot id : running_) {
    const EngineRequest& request = requests_[id];
    fewest = std::min(fewest, steps_to_finish(request));
    if (request.known < window) passes = std::min<std::uint64_t>(passes, window - request.known);
  }
  if (std::optional<DecodeSums> sums = load_if_undisturbed(fewest)) {
    const std::uint64_t mean = sums->load().context_tokens / sums->requests();
    const std::int64_t least_ns = timing_.least_ns(sums->load(), mean, capacity_tokens_);
    if (least_ns <= 0 || fewest > kForeseen || fewest > passes) return after(fewest, least_ns);
    if (in_step_) sums->grow();
    return from_ns + sums->duration_ns(fewest - (in_step_ ? 1 : 0), timing_, capacity_tokens_);
  }
  // Of a step all that is certain is that the request is in it; and one that wants no tokens does not decode.
  std::int64_t least_ns = kNever;
  const std::int64_t first_ns = timing_.least_ns({1, 0, 0}, 1, capacity_tokens_);
  const auto consider = [&](RequestSlot id) {
    const EngineRequest& request = requests_[id];
    const DecodeLoad alone{1, request.known, std::min<std::uint64_t>(request.known, window)};
    const std::int64_t step_ns = request.spec.max_tokens == 0 ? 0 : timing_.least_ns(alone, 1, capacity_tokens_);
    std::uint64_t steps = steps_to_finish(request);
    // The step that ends a prompt (or what is computed again) need not read it as a decode does, and may take no time
    // for the token that it gives.
    if (request.computed < request.spec.prompt_tokens && !timing_.charges_first_token && --steps == 0) {
      least_ns = from_ns;
    } else if (in_step_) {
      least_ns = std::min(least_ns, after(steps, step_ns));
    } else {
      const std::int64_t last_ns = after(steps - 1, step_ns);
      least_ns = std::min(least_ns, last_ns + std::min({step_ns, first_ns, kNever - last_ns}));
    }
  };
  for (const RequestSlot id : running_) consider(id);
  for (const RequestSlot id : waiting_.ids()) consider(id);
  for (const RequestSlot id : skipped_.ids()) consider(id);
  if (parked_ > 0 || loading_ > 0 || least_ns == kNever) return from_ns;
  return least_ns;
}

}  // namespace understudy
