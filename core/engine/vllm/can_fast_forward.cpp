// Whether the next steps can be fast-forwarded, and why not.
#include <algorithm>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"

namespace understudy {

std::optional<StepReason> VllmEngine::why_step() const {
  if (!fast_forwards_) return StepReason::Off;
  if (failed_) return StepReason::Raised;
  if (pipeline_) return StepReason::Pipeline;  // batches end at times of their own
  if (grouped_ != nullptr) {
    // Members that wait for evicted blocks to be copied are stepped.
    if (tiers_ && !offload_ && tiers_->config().mode != OffloadMode::WriteThrough) return StepReason::GroupCopies;
    const auto settled = [this](RequestSlot slot) { return grouped_->settled(requests_[slot]); };
    if (!std::ranges::all_of(running_, settled)) return StepReason::GroupsUnsettled;
    if (refusal_.stands && queues_.candidate() && refusal_.needs <= kv_->available()) return StepReason::GroupsHaveRoom;
  }
  // Such blocks are offloaded a step later than a fast-forward would send them.
  if (kv_->names_on_receipt() && (tiers_ || config_.async_scheduling)) return StepReason::NamesOnReceipt;
  if (kv_->asks_user()) return StepReason::UserPolicy;  // would need a rollback inside a fast-forward
  // Requests receive their tokens where a fast-forward ends, not after each step.
  if (bursts_.on() || config_.speculation.tokens > 0) return StepReason::SeveralTokens;
  if (clock_.in_step || running_.empty()) return StepReason::Idle;
  if (running_.size() > config_.max_num_batched_tokens) return StepReason::Budget;
  if (!timing_.model->needs_sums_only()) return StepReason::Timing;
  // Prompts may be deferred: those in the queue, and the rest of one that a preempted request computes again.
  if (config_.prefill_schedule_interval > 1 &&
      (num_waiting() > 0 ||
       std::ranges::any_of(running_, [this](RequestSlot slot) { return requests_[slot].prefilling; }))) {
    return StepReason::PromptInterval;
  }
  if (offload_ && !is_offload_quiet()) return StepReason::Offload;
  if (loads_ && (polls_ || !offload_) && !are_loads_quiet()) return StepReason::HandOff;
  if (tiers_ && (fast_forward_->has_begun(clock_.now_ns) || head_may_move() || tiers_->calls_user_code_after_steps())) {
    return StepReason::Transfers;
  }
  if (!refusal_.stands && running_.size() < max_running() && queues_.candidate()) {
    // Synchronously, the head needs budget: requests that wait for room leave some.
    const auto waits = [&](RequestSlot id) { return tiers_ && tiers_->waiting(id); };
    if (config_.async_scheduling || running_.size() < config_.max_num_batched_tokens ||
        std::ranges::any_of(running_, waits)) {
      return StepReason::Admission;
    }
  }
  if (config_.async_scheduling) return plans_all_tokens() ? std::nullopt : std::optional(StepReason::Planned);
  const bool decode = std::ranges::all_of(
      running_, [&](RequestSlot id) { return requests_[id].decodes() || (tiers_ && tiers_->waiting(id)); });
  return decode ? std::nullopt : std::optional(StepReason::Prompt);
}

// Under vLLM's offload: a decode step needs nothing from the host, and looks up no request.
bool VllmEngine::is_offload_quiet() const {
  if (!offload_links_ || !config_.offload->prompt_only || !offload_->quiet()) return false;
  if (grouped_ != nullptr && !grouped_->kept_states().empty()) return false;  // the next schedule stores them
  if (!offload_links_->submitted() || offload_links_->has_done() || planned_.meta != nullptr) return false;
  if (!left_.deferred.empty() || !left_.orphans.empty()) return false;  // blocks that come free when a step has ended
  return num_waiting() == 0 || running_.size() >= max_running();
}

// Asynchronously: whether the planned batch computes the next token of every running request that has room.
bool VllmEngine::plans_all_tokens() const {
  if (!tiers_ || offload_) return plans_next_tokens();
  if (tiers_->config().mode != OffloadMode::WriteThrough) return plans_all_but_waiting();
  // A request resumed on cached blocks, with one token to compute, has yet to offer those blocks.
  return plans_next_tokens() && std::ranges::all_of(planned_.turns, [&](const Scheduled& turn) {
           const EngineRequest& request = requests_[turn.slot];
           return request.through >= std::min(num_keyed(request), (turn.before + 1) / config_.block_size);
         });
}

bool VllmEngine::plans_next_token(const Scheduled& turn, RequestSlot slot) const {
  return turn.slot == slot && live(turn) && turn.samples && turn.tokens == 1 && !requests_[slot].tokens.empty();
}

bool VllmEngine::plans_next_tokens() const {
  return std::ranges::equal(planned_.turns, running_,
                            [this](const Scheduled& turn, RequestSlot slot) { return plans_next_token(turn, slot); });
}

// The same for requests that have room; the others wait for it, or did until now. (A failed schedule may have left a
// request waiting whose token is planned.)
bool VllmEngine::plans_all_but_waiting() const {
  if (planned_.empty()) return false;
  auto turn = planned_.turns.begin();
  for (const RequestSlot slot : running_) {
    const bool waits = tiers_->waiting(slot);
    if (turn != planned_.turns.end() && plans_next_token(*turn, slot)) {
      if (waits) return false;
      ++turn;
    } else if (!waits && !requests_[slot].decodes()) {
      return false;
    }
  }
  return turn == planned_.turns.end();
}

// ── A fast-forward, and its calls ──

DecodeState VllmEngine::decode_state() {
  return {.config = config_,
          .timing = timing_,
          .capacity_tokens = capacity_tokens_,
          .kv = *kv_,
          .grouped = grouped_,
          .tiers = tiers_.get(),
          .announcer = announcer_,
          .token_log = token_log_,
          .offloads = offload_ != nullptr,
          .fenced = loads_,
          .requests = requests_,
          .running = running_,
          .waiting = queues_,
          .refusal = refusal_,
          .planned = planned_,
          .clock = clock_,
          .counts = counts_,
          .totals = totals_,
          .tokens = effects_.tokens};
}

// Begins as a step does. False: no step could be run, and an ordinary one must follow.
bool VllmEngine::fast_forward(std::int64_t until_ns, bool stop_on_finish) {
  finish_bound_.reset();
  read_input(clock_.now_ns);
  landing_wait_.on = false;
  if (tiers_) {
    tiers_->hub().run_until(clock_.now_ns);
    notice_landings(clock_.now_ns);
    announcer_.show(clock_.now_ns);
  }
  return fast_forward_->play(until_ns, stop_on_finish);
}

bool VllmEngine::landed(std::int64_t now_ns) {
  notice_landings(now_ns);
  return (offload_links_ && offload_links_->has_done()) || tiers_->has_ready() || head_may_move();
}

void VllmEngine::offload_computed(const std::vector<Scheduled>& filled, std::int64_t end_ns) {
  tiers_->hub().run_until(end_ns);
  if (!offload_) write_through(filled, end_ns);
}

void VllmEngine::finish(RequestSlot slot, std::int64_t end_ns) {
  retire(requests_[slot], false, end_ns);
  complete(slot, end_ns);
}

bool VllmEngine::report_offloads(std::int64_t end_ns) {
  if (!offload_links_->has_done()) return false;
  announcer_.hold();
  report_offload(offload_links_->take_done(), end_ns);
  announcer_.release(end_ns);
  return true;
}

bool VllmEngine::changed_below() const {
  return offload_ || tiers_->config().mode != OffloadMode::OnEviction || tiers_->landings() != landings_noticed_;
}

void VllmEngine::progressed(std::uint64_t steps) {
  finish_bound_.reset();
  if (steps == 0) return;
  fruitless_preemptions_ = 0;
  // Asynchronously the last of them scheduled nothing if all requests have ended.
  interval_.decoded(steps - (config_.async_scheduling && planned_.empty() ? 1 : 0));
}

}  // namespace understudy
