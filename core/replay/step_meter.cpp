#include "replay/step_meter.hpp"

#include <algorithm>

namespace understudy {

void StepMeter::measure(Engine& engine, std::span<const SentRequest> sent, WorkerMetrics& out) {
  const EngineSnapshot now = engine.snapshot();
  out.has_stepped = now.totals.steps > 0 || now.phase == Phase::InStep;
  view_.clear();
  engine.describe_step(view_);
  if (view_.is_open && !view_.entries.empty()) {
    out.step_ns = view_.compute_ns;
    scheduled_.clear();
    for (const StepEntry& entry : view_.entries) {
      scheduled_.push_back(entry.request);
      if (entry.decodes) {
        out.decode.add(std::uint64_t{entry.before} + entry.tokens);
      } else {
        out.prefill.add(entry.tokens);
        out.prefill_context_tokens += entry.before;
      }
    }
    std::ranges::sort(scheduled_);
    for (const SentRequest& request : sent) {
      if (std::ranges::binary_search(scheduled_, request.id)) continue;
      (request.has_tokens ? out.queued_decode : out.queued_prefill).add(request.length);
    }
    return;
  }
  // The engine describes no step: the last requests wait, and those with tokens run before others.
  std::size_t waiting = now.waiting + now.parked;
  for (const bool has_tokens : {false, true}) {
    for (auto at = sent.rbegin(); at != sent.rend(); ++at) {  // clang 14 lacks std::views::reverse
      const SentRequest& request = *at;
      if (request.has_tokens != has_tokens) continue;
      const bool waits = waiting > 0;
      waiting -= waits ? 1 : 0;
      LengthSum& sum =
          has_tokens ? (waits ? out.queued_decode : out.decode) : (waits ? out.queued_prefill : out.prefill);
      sum.add(request.length);
    }
  }
}

}  // namespace understudy
