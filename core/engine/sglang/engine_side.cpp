// An engine between two calls, and one that is a side of a disaggregated server.
#include <algorithm>
#include <array>
#include <utility>

#include "engine/sglang/engine.hpp"

namespace understudy {

Phase SglangEngine::phase() const {
  if (in_step()) return Phase::InStep;
  if (stalled_) return Phase::Stalled;
  if (is_idle()) return Phase::Idle;
  return sleeps_ && port_->next_after(now_ns_) == kNever ? Phase::Asleep : Phase::Ready;
}

std::int64_t SglangEngine::next_call_ns() const {
  switch (phase()) {
    case Phase::Idle:
    case Phase::Stalled:
    case Phase::Asleep:
      return Effects::kNever;
    case Phase::Ready:
      return sleeps_ ? port_->next_after(now_ns_) : now_ns_;
    case Phase::InStep:
      break;
  }
  return now_ns_;
}

// The loop of one side goes on without a batch: until an iteration changes nothing.
void SglangEngine::iterate_idle(std::int64_t now_ns) {
  std::array<std::size_t, 8> before = scheduler_.side_counts();
  for (std::uint32_t same = 0; !planned_.batch && same <= config_.settings.side.polling_interval;) {
    scheduler_.end_iteration(true);
    planned_ = schedule(now_ns);
    const std::array<std::size_t, 8> now = scheduler_.side_counts();
    same = now == std::exchange(before, now) ? same + 1 : 0;
  }
  forget_ended();
  if (planned_.batch) return;
  stalled_ = !scheduler_.empty() && scheduler_.is_side_stuck();
  sleeps_ = !scheduler_.empty() && !stalled_;
}

// The first request of one side needs more memory than there is, and stops all behind it, as in SGLang.
void SglangEngine::describe_side_stall(Stall& stall) const {
  const SglangSide& side = scheduler_.side();
  stall.waiting = scheduler_.num_waiting();
  const bool prefills = config_.settings.side.role == SglangRole::Prefill;
  for (const SglangRequest* const request : side.retracted.empty() ? side.bootstrap : side.retracted) {
    if (!prefills && stall.first.size() < 3) stall.first.push_back({request->id, request->size()});
  }
  stall.note = prefills
                   ? "; a prompt and a page more do not fit into the prefill pool, as in SGLang; raise max_total_tokens"
                   : "; the first of them and " + std::to_string(config_.settings.side.num_reserved_decode_tokens) +
                         " reserved tokens for each request with memory do not fit into the decode pool, as in SGLang; "
                         "lower num_reserved_decode_tokens, or raise max_total_tokens";
}

}  // namespace understudy
