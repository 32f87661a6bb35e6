// Whether the next steps are such that can be leapt over.
#include <algorithm>

#include "engine/vllm/fast_forward.hpp"

namespace understudy {

bool VllmEngine::FastForward::possible() const {
  const VllmEngine& e = engine_;
  if (e.kv_->names_on_receipt() && e.tiers_)
    return false;                        // such blocks go down a step later than a leap would send them
  if (e.kv_->asks_user()) return false;  // and would have to be undone in the middle of a leap
  // Requests learn of their tokens where a leap ends, not after each step.
  if (e.config_.check || e.bursts_.on() || e.config_.speculation.tokens > 0) return false;
  if (e.in_step_ || e.running_.empty() || e.running_.size() > e.config_.max_num_batched_tokens) return false;
  if (!e.timing_.model->needs_sums_only()) return false;
  if (e.offload_ && !possible_offloading()) return false;
  if (e.config_.async_scheduling) return possible_ahead();
  if (e.tiers_ && (has_begun(e.now_ns_) || e.head_may_move() || e.tiers_->calls_user_code_after_steps())) return false;
  if (!e.waiting_.empty() && !e.refusal_.stands && e.running_.size() < e.max_running()) {
    // Who waits for room leaves of the budget what the head of the queue may be given.
    const auto waits = [&](RequestSlot id) { return e.tiers_ && e.tiers_->waiting(id); };
    if (e.running_.size() < e.config_.max_num_batched_tokens || std::ranges::any_of(e.running_, waits)) return false;
  }
  return std::ranges::all_of(e.running_,
                             [&](RequestSlot id) { return decodes(id) || (e.tiers_ && e.tiers_->waiting(id)); });
}

// Under vLLM's offload: a step of decodes asks nothing of the host, and nobody is looked up.
bool VllmEngine::FastForward::possible_offloading() const {
  const VllmEngine& e = engine_;
  if (e.offload_steps_ || !e.config_.offload->prompt_only || !e.offload_->quiet()) return false;
  if (!e.offload_links_->submitted() || e.offload_links_->has_done() || !e.planned_.orders.empty()) return false;
  if (!e.deferred_frees_.empty() || !e.orphans_.empty()) return false;  // blocks that come free when a step has ended
  return e.num_waiting() == 0 || e.running_.size() >= e.max_running();
}

// The same with a batch planned, which must be of everybody's next token.
bool VllmEngine::FastForward::possible_ahead() const {
  const VllmEngine& e = engine_;
  if (e.kv_->names_on_receipt()) return false;
  if (e.tiers_ && (has_begun(e.now_ns_) || e.head_may_move() || e.tiers_->calls_user_code_after_steps())) return false;
  if (!e.waiting_.empty() && !e.refusal_.stands && e.running_.size() < e.max_running()) return false;
  if (!e.tiers_ || e.offload_) return plans_next_tokens();
  if (e.tiers_->config().mode != OffloadMode::WriteThrough) return plans_all_but_waiting();
  // Who has just come back on blocks that it found, with one token to compute, has yet to offer those.
  return plans_next_tokens() && std::ranges::all_of(e.planned_.turns, [&](const Scheduled& turn) {
           const EngineRequest& request = e.requests_[turn.slot];
           return request.through >= std::min(request.keyed, (turn.before + 1) / size_);
         });
}

bool VllmEngine::FastForward::plans_next_token(const Scheduled& turn, RequestSlot slot) const {
  const VllmEngine& e = engine_;
  return turn.slot == slot && e.live(turn) && turn.samples && turn.tokens == 1 && !e.requests_[slot].tokens.empty();
}

bool VllmEngine::FastForward::plans_next_tokens() const {
  return std::ranges::equal(engine_.planned_.turns, engine_.running_,
                            [this](const Scheduled& turn, RequestSlot slot) { return plans_next_token(turn, slot); });
}

// The same of those who have room; the others wait for it, or did until now. (A schedule that failed may have left
// somebody waiting whose token is planned.)
bool VllmEngine::FastForward::plans_all_but_waiting() const {
  const VllmEngine& e = engine_;
  if (e.planned_.empty()) return false;
  auto turn = e.planned_.turns.begin();
  for (const RequestSlot slot : e.running_) {
    const bool waits = e.tiers_->waiting(slot);
    if (turn != e.planned_.turns.end() && plans_next_token(*turn, slot)) {
      if (waits) return false;
      ++turn;
    } else if (!waits && !decodes(slot)) {
      return false;
    }
  }
  return turn == e.planned_.turns.end();
}

bool VllmEngine::FastForward::has_room(std::uint64_t blocks) const {
  const VllmEngine& e = engine_;
  if (blocks > e.kv_->available()) return false;
  if (!e.tiers_ || e.tiers_->config().mode == OffloadMode::WriteThrough) return true;
  // What is cached leaves by a copy, which takes time; and in some orders it may come before what is empty.
  return e.kv_->evicts_last() && blocks <= e.kv_->usage().free;
}

std::int64_t VllmEngine::FastForward::step_of_all_ns() const {
  DecodeSums sums(*engine_.timing_.model);
  if (engine_.config_.async_scheduling) {
    for (const Scheduled& turn : engine_.planned_.turns) sums.add(engine_.requests_[turn.slot].known);
  } else {
    for (const RequestSlot id : engine_.running_) {
      if (!engine_.tiers_ || !engine_.tiers_->waiting(id)) sums.add(engine_.requests_[id].known);
    }
  }
  return engine_.timing_.duration_ns(sums.load(), engine_.capacity_tokens_);
}

}  // namespace understudy
