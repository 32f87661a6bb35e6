// Whether the next steps can be fast-forwarded, and why not.
#include <algorithm>

#include "engine/vllm/engine.hpp"
#include "engine/vllm/fast_forward.hpp"
#include "engine/vllm/groups/block_groups.hpp"

namespace understudy {

std::optional<StepReason> VllmEngine::why_step() const {
  if (!fast_forwards_) return StepReason::Off;
  if (scheduler_->is_suspended()) return StepReason::Raised;
  if (pipeline_) return StepReason::Pipeline;  // batches end at times of their own
  if (grouped_ != nullptr) {
    // Members that wait for evicted blocks to be copied are stepped.
    if (tiers_ && !offload_ && tiers_->config().mode != OffloadMode::WriteThrough) return StepReason::GroupCopies;
    const auto settled = [this](RequestSlot slot) { return grouped_->settled(scheduler_->requests()[slot]); };
    if (!std::ranges::all_of(scheduler_->running(), settled)) return StepReason::GroupsUnsettled;
    if (scheduler_->refusal().stands && scheduler_->waiting().candidate() &&
        scheduler_->refusal().needs <= kv_->available())
      return StepReason::GroupsHaveRoom;
  }
  // Such blocks are offloaded a step later than a fast-forward would send them.
  if (kv_->names_on_receipt() && (tiers_ || config_.async_scheduling)) return StepReason::NamesOnReceipt;
  if (kv_->asks_user()) return StepReason::UserPolicy;  // would need a rollback inside a fast-forward
  // Requests receive their tokens where a fast-forward ends, not after each step.
  if (!config_.mocker.accept_rates.empty() || config_.speculation.tokens > 0) return StepReason::SeveralTokens;
  if (clock_.in_step || scheduler_->running().empty()) return StepReason::Idle;
  if (scheduler_->running().size() > config_.max_num_batched_tokens) return StepReason::Budget;
  if (!timing_.model->needs_sums_only()) return StepReason::Timing;
  // Prompts may be deferred: those in the queue, and the rest of one that a preempted request computes again.
  if (config_.prefill_schedule_interval > 1 &&
      (num_waiting() > 0 || std::ranges::any_of(scheduler_->running(), [this](RequestSlot slot) {
         return scheduler_->requests()[slot].prefilling;
       }))) {
    return StepReason::PromptInterval;
  }
  if (offload_ && !is_offload_quiet()) return StepReason::Offload;
  if (connector_->loads() && (polls_ || !offload_) && !are_loads_quiet()) return StepReason::HandOff;
  if (tiers_ && (fast_forward_->has_begun(clock_.now_ns) || scheduler_->head_may_move() ||
                 tiers_->calls_user_code_after_steps())) {
    return StepReason::Transfers;
  }
  if (!scheduler_->refusal().stands && scheduler_->running().size() < scheduler_->max_running() &&
      scheduler_->waiting().candidate()) {
    // Synchronously, the head needs budget: requests that wait for room leave some.
    if (config_.async_scheduling || scheduler_->running().size() < config_.max_num_batched_tokens ||
        std::ranges::any_of(scheduler_->running(), [this](RequestSlot slot) { return waits(slot); })) {
      return StepReason::Admission;
    }
  }
  if (config_.async_scheduling) return plans_all_tokens() ? std::nullopt : std::optional(StepReason::Planned);
  const bool decode = std::ranges::all_of(
      scheduler_->running(), [&](RequestSlot id) { return scheduler_->requests()[id].decodes() || waits(id); });
  return decode ? std::nullopt : std::optional(StepReason::Prompt);
}

// Under vLLM's offload: a decode step needs nothing from the host, and looks up no request.
bool VllmEngine::is_offload_quiet() const {
  if (!offload_links_ || !config_.offload->prompt_only || !offload_->quiet()) return false;
  if (grouped_ != nullptr && !grouped_->blocks()->kept_states().empty()) return false;  // the next schedule stores them
  if (!offload_links_->submitted() || offload_links_->has_done() || planned_.meta != nullptr) return false;
  if (!scheduler_->left().deferred.empty() || !scheduler_->left().orphans.empty())
    return false;  // blocks that come free when a step has ended
  return num_waiting() == 0 || scheduler_->running().size() >= scheduler_->max_running();
}

// Asynchronously: whether the planned batch computes the next token of every running request that has room.
bool VllmEngine::plans_all_tokens() const {
  if (!tiers_ || offload_) return plans_next_tokens();
  if (tiers_->config().mode != OffloadMode::WriteThrough) return plans_all_but_waiting();
  // A request resumed on cached blocks, with one token to compute, has yet to offer those blocks.
  return plans_next_tokens() && std::ranges::all_of(planned_.turns, [&](const Scheduled& turn) {
           const EngineRequest& request = scheduler_->requests()[turn.slot];
           return request.through >= std::min(num_keyed(request), (turn.before + 1) / config_.block_size);
         });
}

bool VllmEngine::plans_next_token(const Scheduled& turn, RequestSlot slot) const {
  return turn.slot == slot && scheduler_->live(turn) && turn.samples && turn.tokens == 1 &&
         !scheduler_->requests()[slot].tokens.empty();
}

bool VllmEngine::plans_next_tokens() const {
  return std::ranges::equal(planned_.turns, scheduler_->running(),
                            [this](const Scheduled& turn, RequestSlot slot) { return plans_next_token(turn, slot); });
}

// The same for requests that have room; the others wait for it, or did until now. (A failed schedule may have left a
// request waiting whose token is planned.)
bool VllmEngine::plans_all_but_waiting() const {
  if (planned_.empty()) return false;
  auto turn = planned_.turns.begin();
  for (const RequestSlot slot : scheduler_->running()) {
    const bool waits = tiers_->waiting(slot);
    if (turn != planned_.turns.end() && plans_next_token(*turn, slot)) {
      if (waits) return false;
      ++turn;
    } else if (!waits && !scheduler_->requests()[slot].decodes()) {
      return false;
    }
  }
  return turn == planned_.turns.end();
}

// ── Connectors ──

// Whether the next schedule may send something to another worker, so that it must not be run ahead of time.
bool VllmEngine::begins_in_order() const {
  if (!polls_ || !connector_->loads()) return false;
  const bool admits =
      !scheduler_->waiting().waiting().empty() && scheduler_->running().size() < scheduler_->max_running();
  return admits || connector_->sends_at(clock_.now_ns);
}

// Whether a failed read is about to end its request, at the end of any step.
bool VllmEngine::may_fail_load() const noexcept {
  if (!polls_ || !connector_->loads() || !config_.transfer || config_.transfer->recomputes) return false;
  return connector_->has_failed() || !scheduler_->orders().output.failed.empty() || !open_.output.failed.empty() ||
         !planned_.output.failed.empty();
}

// Requests that load change nothing until their blocks have come.
bool VllmEngine::are_loads_quiet() const {
  if (!polls_ || begins_in_order() || !planned_.output.empty() || !scheduler_->left().deferred.empty()) return false;
  if (connector_->next_event_ns() <= clock_.now_ns) return false;
  const std::vector<EngineRequest>& requests = scheduler_->requests();
  return std::ranges::all_of(scheduler_->waiting().skipped().ids(), [&](RequestSlot slot) {
    return requests[slot].status == RequestStatus::Loading && !requests[slot].loaded;
  });
}

// ── A fast-forward, and its calls ──

DecodeState VllmEngine::decode_state() {
  const Decoding decoding = scheduler_->decoding();
  return {.config = config_,
          .timing = timing_,
          .capacity_tokens = capacity_tokens_,
          .kv = *kv_,
          .grouped = grouped_,
          .tiers = tiers_.get(),
          .announcer = announcer_,
          .token_log = token_log_,
          .offloads = offload_ != nullptr,
          .fenced = connector_->loads(),
          .requests = decoding.requests,
          .running = decoding.running,
          .waiting = decoding.waiting,
          .refusal = decoding.refusal,
          .planned = planned_,
          .clock = clock_,
          .counts = decoding.steps,
          .totals = totals_,
          .tokens = effects_.tokens};
}

// Begins as a step does. False: no step could be run, and an ordinary one must follow.
bool VllmEngine::fast_forward(std::int64_t until_ns, bool stop_on_finish) {
  finish_bound_.reset();
  read_input(clock_.now_ns);
  nap_.on = false;
  if (tiers_) {
    tiers_->hub().run_until(clock_.now_ns);
    notice_landings(clock_.now_ns);
    announcer_.show(clock_.now_ns);
  }
  return fast_forward_->play(until_ns, stop_on_finish);
}

bool VllmEngine::landed(std::int64_t now_ns) {
  notice_landings(now_ns);
  return (offload_links_ && offload_links_->has_done()) || tiers_->has_ready() || scheduler_->head_may_move();
}

void VllmEngine::offload_computed(const std::vector<Scheduled>& filled, std::int64_t end_ns) {
  tiers_->hub().run_until(end_ns);
  if (!offload_) write_through(filled, end_ns);
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
  scheduler_->note_progress();
  // Asynchronously the last of them scheduled nothing if all requests have ended.
  scheduler_->interval().decoded(steps - (config_.async_scheduling && planned_.empty() ? 1 : 0));
}

}  // namespace understudy
