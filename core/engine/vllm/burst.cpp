// Speculative bursts: a step computes a draft besides the token it schedules, and several tokens may come of it.
#include <algorithm>

#include "engine/vllm/engine.hpp"

namespace understudy {

// Tokens beyond the first `total` that a turn ending there needs room for: its longest burst, should it sample.
std::uint32_t VllmEngine::burst_room(const EngineRequest& request, std::uint32_t total) const noexcept {
  if (!bursts_.on() || total < request.known) return 0;
  return std::min(bursts_.longest(), outputs_left(request));
}

// All tokens of a burst but its last have been computed by the step; blocks that it did not need go back.
void VllmEngine::receive_burst(EngineRequest& request) {
  const std::uint32_t tokens = bursts_.draw(outputs_left(request));
  if (tokens == 0) return;
  ++totals_.burst_steps;
  totals_.burst_tokens += tokens;
  request.known += tokens;
  request.computed = request.known - 1;
  if (!shared_) key_blocks(request, request.computed);
  const std::size_t needed = blocks_for(request.computed);
  store_.release(0, std::span<const SlotId>(request.table).subspan(needed), true);
  request.table.resize(needed);
}

// ── vLLM's own speculation: drafts are scheduled as tokens, and rejected ones are computed again ──

// Tokens behind the first `total` that need room because the drafter writes there.
std::uint32_t VllmEngine::lookahead(std::uint32_t total, bool admission) const noexcept {
  if (admission && !config_.speculation.admission_lookahead) return 0;
  return std::min(config_.speculation.lookahead, config_.max_model_len - std::min(total, config_.max_model_len));
}

void VllmEngine::charge(std::uint32_t tokens) noexcept {
  budget_ -= tokens;
  input_budget_ -= tokens + config_.speculation.draft_slots;
}

// One token and the drafts that were right; what was computed for the others is forgotten, their blocks stay.
void VllmEngine::receive_drafts(EngineRequest& request, const Scheduled& turn) {
  const bool running = request.status == RequestStatus::Running;  // else it was preempted meanwhile
  std::uint32_t accepted = 0;
  if (!turn.blank && turn.drafts > 0) {
    const auto* known = request.spec.accepts.get();
    accepted = known == nullptr ? acceptance_.accept(turn.drafts)
                                : std::min((*known)[request.outputs() % known->size()], turn.drafts);
  }
  if (turn.drafts > 0) {
    ++totals_.draft_rounds;
    totals_.drafted_tokens += turn.drafts;
    totals_.accepted_tokens += accepted;
  }
  const std::uint32_t tokens = std::min(1 + accepted, outputs_left(request));
  request.known += tokens;
  if (!running) return;
  const std::uint32_t rejected = turn.drafts - accepted;
  request.computed -= rejected;
  if (config_.async_scheduling) {
    request.ahead -= rejected + tokens;
  } else {
    request.drafts = config_.speculation.tokens;
  }
}

}  // namespace understudy
