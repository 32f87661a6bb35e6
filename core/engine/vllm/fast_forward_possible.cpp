// Whether the next steps are such that can be leapt over.
#include <algorithm>

#include "engine/vllm/fast_forward.hpp"

namespace understudy {

bool VllmEngine::FastForward::possible() const {
  const VllmEngine& e = engine_;
  if (e.kv_->names_on_receipt() && e.tiers_)
    return false;                        // such blocks are offloaded a step later than a fast-forward would send them
  if (e.kv_->asks_user()) return false;  // would need a rollback inside a fast-forward
  // Requests receive their tokens where a fast-forward ends, not after each step.
  if (e.config_.check || e.bursts_.on() || e.config_.speculation.tokens > 0) return false;
  if (e.in_step_ || e.running_.empty() || e.running_.size() > e.config_.max_num_batched_tokens) return false;
  if (!e.timing_.model->needs_sums_only()) return false;
  if (e.offload_ && !possible_offloading()) return false;
  if (e.config_.async_scheduling) return possible_ahead();
  if (e.tiers_ && (has_begun(e.now_ns_) || e.head_may_move() || e.tiers_->calls_user_code_after_steps())) return false;
  if (!e.waiting_.empty() && !e.refusal_.stands && e.running_.size() < e.max_running()) {
    // Requests that wait for room leave budget that the head of the queue may take.
    const auto waits = [&](RequestSlot id) { return e.tiers_ && e.tiers_->waiting(id); };
    if (e.running_.size() < e.config_.max_num_batched_tokens || std::ranges::any_of(e.running_, waits)) return false;
  }
  return std::ranges::all_of(e.running_,
                             [&](RequestSlot id) { return decodes(id) || (e.tiers_ && e.tiers_->waiting(id)); });
}

// Under vLLM's offload: a decode step needs nothing from the host, and looks up no request.
bool VllmEngine::FastForward::possible_offloading() const {
  const VllmEngine& e = engine_;
  if (e.offload_steps_ || !e.config_.offload->prompt_only || !e.offload_->quiet()) return false;
  if (!e.offload_links_->submitted() || e.offload_links_->has_done() || !e.planned_.orders.empty()) return false;
  if (!e.deferred_frees_.empty() || !e.orphans_.empty()) return false;  // blocks that come free when a step has ended
  return e.num_waiting() == 0 || e.running_.size() >= e.max_running();
}

// The same with a planned batch, which must compute the next token of every running request.
bool VllmEngine::FastForward::possible_ahead() const {
  const VllmEngine& e = engine_;
  if (e.kv_->names_on_receipt()) return false;
  if (e.tiers_ && (has_begun(e.now_ns_) || e.head_may_move() || e.tiers_->calls_user_code_after_steps())) return false;
  if (!e.waiting_.empty() && !e.refusal_.stands && e.running_.size() < e.max_running()) return false;
  if (!e.tiers_ || e.offload_) return plans_next_tokens();
  if (e.tiers_->config().mode != OffloadMode::WriteThrough) return plans_all_but_waiting();
  // A request resumed on cached blocks, with one token to compute, has yet to offer those blocks.
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

// The same for requests that have room; the others wait for it, or did until now. (A failed schedule may have left a
// request waiting whose token is planned.)
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
  // Evicting a cached block needs a copy, which takes time; and some orders evict it before empty ones are used.
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
