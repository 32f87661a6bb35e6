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

}  // namespace understudy
