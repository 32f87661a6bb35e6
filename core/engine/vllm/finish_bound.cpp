// A lower bound of the next finish time, without running the steps before it.
#include <algorithm>
#include <array>
#include <limits>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

namespace {

constexpr std::size_t kWarm = 8;           // requests that are prefetched ahead of their use
constexpr std::uint64_t kMostTimed = 128;  // steps: timing more of them costs more than predicting again

}  // namespace

// Until a request is submitted, every decoding request gets a token in each step until the first finish: blocks suffice
// for all of them, and they are scheduled before requests that compute a prompt or wait.
std::optional<Outlook> VllmEngine::outlook() const {
  if (grouped_ != nullptr || scheduler_->running().empty() || scheduler_->counts().parked > 0 ||
      (scheduler_->counts().loading > 0 && (!polls_ || offload_)) || !config_.mocker.accept_rates.empty() ||
      config_.speculation.tokens > 0 || scheduler_->running().size() > config_.max_num_batched_tokens) {
    return std::nullopt;
  }
  const bool ahead = config_.async_scheduling;  // by a step, and a token
  if (ahead && !plans_next_tokens()) return std::nullopt;
  Outlook out{DecodeSums(*timing_.model)};
  DecodeSums& sums = out.sums;
  std::size_t prompts = 0;
  // A token a step.
  const auto to_finish = [&](const EngineRequest& request) {
    const std::uint64_t all = expected_outputs(request);
    return all > request.outputs() ? all - request.outputs() : 1;
  };
  const EngineRequest* const requests = scheduler_->requests().data();
  for (std::size_t i = 0; i < scheduler_->running().size(); ++i) {
    const RequestSlot id = scheduler_->running()[i];
    if (i + 1 < scheduler_->running().size()) requests[scheduler_->running()[i + 1]].warm();
    const EngineRequest& request = requests[id];
    if (request.spec.max_tokens == 0 || waits(id)) return std::nullopt;
    out.steps = std::min(out.steps, to_finish(request));
    // The last token of a prompt is no decode. A step ahead, a request that resumes with the planned batch, for a
    // single token, gets none from the open one.
    const bool decodes = request.num_computed_tokens + (clock_.in_step ? 0 : 1) == request.known + (ahead ? 1 : 0) &&
                         request.num_computed_tokens >= request.spec.prompt_tokens;
    if (!decodes) {
      ++prompts;
      continue;
    }
    if (prompts > 0) return std::nullopt;
    sums.add(request.known);
    if (request.known < sums.window()) {
      out.to_window = std::min<std::uint64_t>(out.to_window, sums.window() - request.known);
    }
  }
  out.alone = prompts == 0 && num_waiting() == 0;
  if (sums.requests() == 0 || (!out.alone && (tiers_ || offload_))) return std::nullopt;
  // Each that waits counts a block or more below; long queues are not visited for that.
  if (!kv_->has_room(num_waiting(), tiers_.get())) return std::nullopt;
  scheduler_->waiting().for_each(
      [&](RequestSlot id) { out.steps = std::min(out.steps, to_finish(scheduler_->requests()[id])); });
  const std::uint64_t steps = out.steps + (ahead ? 1 : 0);
  const auto lacks = [&](RequestSlot id) {
    return kv_->lacks(scheduler_->requests()[id], scheduler_->requests()[id].known + steps);
  };
  std::uint64_t blocks = 0;
  scheduler_->waiting().for_each([&](RequestSlot id) { blocks += lacks(id) + 1; });
  for (std::size_t i = sums.requests(); i < scheduler_->running().size(); ++i)
    blocks += lacks(scheduler_->running()[i]) + 1;
  // Nearly always there is room for many more.
  if (kv_->has_room(blocks + sums.requests() * (steps / config_.block_size + 2), tiers_.get())) return out;
  for (std::size_t i = 0; i < sums.requests(); ++i) blocks += lacks(scheduler_->running()[i]);
  return kv_->has_room(blocks, tiers_.get()) ? std::optional(out) : std::nullopt;
}

std::uint32_t VllmEngine::expected_outputs(const EngineRequest& request) const noexcept {
  return std::min(request.spec.outputs(), config_.max_model_len - request.spec.prompt_tokens);
}

// Every one of them ends with a token of the request, or with several if it speculates.
std::uint64_t VllmEngine::steps_to_finish(const EngineRequest& request) const noexcept {
  const std::uint64_t left = expected_outputs(request) - std::min(request.outputs(), expected_outputs(request));
  const std::uint64_t drafts = std::max<std::uint64_t>(config_.mocker.accept_rates.size(), config_.speculation.tokens);
  return std::max<std::uint64_t>(1, drafts == 0 ? left : (left + drafts) / (drafts + 1));
}

// Whether all present requests can stay until they finish, without a preemption.
bool VllmEngine::has_room_for_all() const {
  if (!config_.mocker.accept_rates.empty() || config_.speculation.tokens > 0)
    return false;  // bursts and drafts take more blocks than their tokens
  std::uint64_t blocks = 0;
  const auto add = [&](RequestSlot id) {
    const EngineRequest& request = scheduler_->requests()[id];
    blocks += kv_->lacks(request, request.spec.prompt_tokens + expected_outputs(request));
  };
  std::ranges::for_each(scheduler_->running(), add);
  scheduler_->waiting().for_each(add);
  return kv_->has_room(blocks, tiers_.get());
}

std::int64_t VllmEngine::next_visible_ns() const {
  if (!finish_bound_ || tiers_ || polls_) finish_bound_ = finish_bound();
  return *finish_bound_;
}

std::int64_t VllmEngine::finish_bound() const {
  if (idle() && !clock_.in_step) return kNever;
  if (pipeline_) return clock_.now_ns;  // batches in flight end one soon after the other
  if (begins_in_order()) return is_polling() ? nap_until_ns() : clock_.now_ns;
  std::int64_t from_ns = clock_.now_ns;
  if (nap_.on) {
    const std::int64_t until_ns = nap_until_ns();
    if (is_polling() || until_ns != kNever) from_ns = until_ns;
    if (from_ns == kNever) return from_ns;
  }
  if (may_fail_load()) return from_ns;
  // The step that is open may be the first of them.
  const auto after = [&](std::uint64_t steps, std::int64_t step_ns) {
    if (clock_.in_step) --steps;
    const std::int64_t most = (kNever - from_ns) / std::max<std::int64_t>(step_ns, 1);
    return from_ns + std::min(static_cast<std::int64_t>(std::min<std::uint64_t>(steps, 1u << 31)), most) * step_ns;
  };
  if (std::optional<Outlook> out = outlook()) {
    DecodeSums& sums = out->sums;
    const std::uint64_t mean = out->alone ? sums.load().context_tokens / sums.requests() : 1;
    const std::int64_t least_ns = timing_.least_ns(sums.load(), mean, capacity_tokens_);
    if (!out->alone || least_ns <= 0 || out->steps > std::min(kMostTimed, out->to_window)) {
      return after(out->steps, least_ns);
    }
    if (clock_.in_step) sums.grow();
    return from_ns + sums.duration_ns(out->steps - (clock_.in_step ? 1 : 0), timing_, capacity_tokens_);
  }
  // A preempted request may get any number of its next tokens from recomputing steps, which are not charged.
  if (!timing_.charges_first_token && !has_room_for_all()) return from_ns;
  // A step that gives a request a token certainly includes the request; nothing more is known. A preempted request gets
  // one from a recomputing step, which need not read the context as a decode does; and a request for zero tokens does
  // not decode.
  std::int64_t least_ns = kNever;
  const std::int64_t token_ns = timing_.least_ns({1, 0, 0}, 1, capacity_tokens_);
  const auto consider = [&](RequestSlot id, bool ends_prompt) {
    const EngineRequest& request = scheduler_->requests()[id];
    std::uint64_t steps = steps_to_finish(request);
    // The step that ends a prompt (or a recomputation) may take no time for its token.
    if (ends_prompt && !timing_.charges_first_token && --steps == 0) {
      least_ns = from_ns;
    } else {
      least_ns = std::min(least_ns, after(steps, request.spec.max_tokens == 0 ? 0 : token_ns));
    }
  };
  const auto prefills = [&](RequestSlot id) {
    return scheduler_->requests()[id].num_computed_tokens < scheduler_->requests()[id].spec.prompt_tokens;
  };
  for (const RequestSlot id : scheduler_->running()) consider(id, prefills(id));
  // Queues may be longer than caches: the fewest steps of all give the earliest end, and requests are read late.
  std::uint64_t queued_steps = std::numeric_limits<std::uint64_t>::max();
  const auto read = [&](RequestSlot id) {
    const EngineRequest& request = scheduler_->requests()[id];
    std::uint64_t steps = steps_to_finish(request);
    if (!timing_.charges_first_token && prefills(id)) --steps;
    queued_steps = request.spec.max_tokens == 0 ? 0 : std::min(queued_steps, steps);
  };
  std::array<RequestSlot, kWarm> warmed{};
  std::size_t seen = 0;
  scheduler_->waiting().for_each([&](RequestSlot id) {
    scheduler_->requests()[id].warm();
    if (seen >= kWarm) read(warmed[seen % kWarm]);
    warmed[seen++ % kWarm] = id;
  });
  for (std::size_t i = seen - std::min(seen, kWarm); i < seen; ++i) read(warmed[i % kWarm]);
  if (queued_steps == 0) {
    least_ns = from_ns;
  } else if (num_waiting() > 0) {
    least_ns = std::min(least_ns, after(queued_steps, token_ns));
  }
  // A step ahead, planned tokens count as computed, but are not yet.
  for (const Scheduled& turn : planned_.turns) {
    if (scheduler_->live(turn) && turn.before < scheduler_->requests()[turn.slot].spec.prompt_tokens)
      consider(turn.slot, true);
  }
  if (scheduler_->counts().parked > 0 || (scheduler_->counts().loading > 0 && (!polls_ || offload_)) ||
      least_ns == kNever)
    return from_ns;
  return least_ns;
}

}  // namespace understudy
