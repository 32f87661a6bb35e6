// The open step for a recorder.
#include <algorithm>

#include "engine/vllm/engine.hpp"

namespace understudy {

void VllmEngine::describe_step(StepView& out) const {
  out.is_open = clock_.in_step;
  for (std::size_t i = 0; i < scheduler_->log().admitted.size(); ++i) {
    out.admitted.push_back({scheduler_->log().admitted[i], scheduler_->log().resumed[i], scheduler_->log().cached[i]});
  }
  for (std::size_t i = 0; i < scheduler_->log().preempted.size(); ++i) {
    out.preempted.push_back({scheduler_->log().preempted[i], scheduler_->log().preempted_for[i]});
  }
  if (!clock_.in_step) return;
  for (const Scheduled& turn : batch()) out.entries.push_back(entry_of(turn));
  const StepLoad& load = open_load();
  out.compute_ns = timing_.duration_ns(load, capacity_tokens_);
  if (load.decodes > 0 && !load.chunks.empty()) {
    out.decodes_ns = timing_.duration_ns(load.as_decodes(), capacity_tokens_);
  }
  if (scheduler_->counts().parked + scheduler_->counts().loading > 0) {
    for (const auto& [id, slot] : scheduler_->slots()) {
      const RequestStatus status = scheduler_->requests()[slot].status;
      if (status == RequestStatus::Parked || status == RequestStatus::Loading) out.loading.push_back(id);
    }
    std::ranges::sort(out.loading);
  }
  out.stop = why_waiting();
  const WaitingQueue& queue =
      scheduler_->waiting().waiting().empty() ? scheduler_->waiting().skipped() : scheduler_->waiting().waiting();
  if (!queue.empty()) out.head = scheduler_->requests()[scheduler_->waiting().candidate().value_or(queue.head())].id;
  out.running = scheduler_->running().size();
  out.waiting = num_waiting() + scheduler_->counts().parked;
  const PoolMetrics metrics = kv_->metrics();
  out.active_blocks = metrics.total_blocks - metrics.reset_blocks - metrics.inactive_blocks;
}

// The entry, and how long a step would take that computes nothing else.
StepEntry VllmEngine::entry_of(const Scheduled& turn) const {
  const EngineRequest& request = scheduler_->requests()[turn.slot];
  // Asynchronously, the request may have ended since; then it was decoding.
  const bool is_here = request.id == turn.id;
  const std::uint32_t prompt = is_here ? request.spec.prompt_tokens : 0;
  const bool emits = !is_here || request.spec.max_tokens > 0;
  StepLoad load;
  load.requests = 1;
  load.tokens = turn.tokens;
  load.drafts = turn.drafts;
  if (turn.before < prompt) load.mocker = {1, std::min(turn.before + turn.tokens, prompt), turn.before, 0, 0};
  if (turn.samples && emits && (turn.before >= prompt || timing_.charges_first_token)) {
    load.mocker.decode_requests = 1;
    load.mocker.decode_context_tokens = turn.before + turn.tokens - turn.drafts;
  }
  const bool decodes = turn.before >= prompt && turn.tokens <= 1 + turn.drafts;
  if (decodes) {
    load.add_decode(turn.before + turn.tokens, timing_.model->window(), turn.drafts);
  } else {
    load.chunks.push_back({turn.tokens, turn.before});
  }
  return {turn.id, turn.tokens, turn.before, decodes, timing_.duration_ns(load, capacity_tokens_)};
}

AdmissionStop VllmEngine::why_waiting() const {
  if (num_waiting() == 0) return AdmissionStop::None;
  if (!scheduler_->log().preempted.empty()) return AdmissionStop::Preempted;
  if (scheduler_->running().size() >= scheduler_->max_running()) return AdmissionStop::Slots;
  if (!scheduler_->has_budget()) return AdmissionStop::Budget;
  if (scheduler_->refusal().no_room) return AdmissionStop::Blocks;
  const std::optional<RequestSlot> head = scheduler_->waiting().candidate();
  const bool waits = scheduler_->counts().loading > 0 || (tiers_ && head && tiers_->waiting(*head));
  if (waits) return AdmissionStop::Transfers;
  return config_.enable_chunked_prefill ? AdmissionStop::Other : AdmissionStop::Budget;
}

}  // namespace understudy
