// The scheduling half of a step: the running list, then (admit.cpp) the queues.
#include <algorithm>
#include <tuple>
#include <utility>

#include "base/assert.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

// There is no decode or prefill phase: each request has computed tokens and known ones, and gets tokens to catch up.
// Those that run come first; with what is left of the budget, those that wait are admitted.
void Scheduler::schedule(std::int64_t now_ns) {
  kv_.begin_schedule();
  if (continues_at(now_ns)) {
    continue_schedule(now_ns);
  } else {
    begin_schedule();
  }
  if (!running_is_done_) schedule_running(now_ns);
  running_is_done_ = true;
  if (!has_preempted()) admit(now_ns);
  UNDERSTUDY_ASSERT(budget_ <= config_.max_num_batched_tokens, "a schedule stays within the budget of tokens");
  UNDERSTUDY_ASSERT(running_.size() <= config_.max_num_seqs, "no more requests run than max_num_seqs");
}

void Scheduler::begin_schedule() {
  log_.scheduled.clear();
  refusal_ = {};
  budget_ = config_.max_num_batched_tokens - config_.speculation.reserved_slots;
  input_budget_ = config_.max_num_batched_tokens;
  prefill_cap_ = prefill_cap();
  interval_.begin(config_.prefill_schedule_interval, running_, requests_);
  cursor_ = 0;
  running_is_done_ = false;
  preempted_before_ = log_.preempted.size();
  admitted_before_ = log_.admitted.size();
}

// ── Phase 1: the running list, in order, without rotation ──

void Scheduler::schedule_running(std::int64_t now_ns) {
  while (cursor_ < running_.size() && has_budget()) {
    const RequestSlot slot = running_[cursor_];
    if (cursor_ + 1 < running_.size()) requests_[running_[cursor_ + 1]].warm();
    EngineRequest& request = requests_[slot];
    const std::uint32_t tokens = defers(slot) ? 0 : num_new_tokens(request);
    if (tokens == 0) {
      ++cursor_;
      continue;
    }
    const std::uint32_t end = request.num_computed_tokens + tokens;
    Room room = Room::Short;
    bool itself = false;
    while (!itself && (room = allocate_slots(request, end, now_ns)) == Room::Short) {
      if (yield_hold(now_ns)) continue;
      const std::size_t victim = choose_victim();
      if (spares_in_flight_ && !freeable(requests_[running_[victim]].last_step)) return;
      itself = running_[victim] == slot;
      if (victim < cursor_) --cursor_;
      preempt_request(victim, request.id, now_ns);
      if (itself && config_.self_preemption_ends) return;
    }
    if (itself) continue;  // the cursor is at the next request
    ++cursor_;
    if (room == Room::Wait) continue;
    const std::uint32_t real = request.known + request.ahead;
    log_.scheduled.push_back({slot, tokens, 0, false, request.id, end > real ? end - real : 0, false});
    request.drafts = 0;
    if (request.prefilling) interval_.carry();
    charge(tokens);
  }
}

KvBackend::Room Scheduler::allocate_slots(EngineRequest& request, std::uint32_t end, std::int64_t now_ns) {
  return kv_.grow(request, room_up_to(request, end, false), end, now_ns);
}

// Whether a running request gets no tokens whatever it lacks: its next block waits for a copy, or prompts wait.
bool Scheduler::defers(RequestSlot slot) const {
  return (tiers_ != nullptr && tiers_->waiting(slot)) || (interval_.defers() && requests_[slot].prefilling);
}

std::uint32_t Scheduler::num_new_tokens(const EngineRequest& request) const {
  const std::uint32_t computed = request.num_computed_tokens;
  const std::uint64_t end = std::uint64_t{request.spec.prompt_tokens} + request.spec.max_tokens;
  if (request.ahead > 0 && std::uint64_t{computed} + 2 - request.ahead >= end) return 0;  // the last token is in flight
  if (counts_.schedules + 1 < request.eligible_at) return 0;
  const std::uint32_t tokens = std::min(request.known + request.drafts + request.ahead - computed, prefill_cap_);
  const std::uint32_t room = config_.max_model_len - std::min(computed + 1, config_.max_model_len);
  const std::uint64_t input = input_budget_ - config_.speculation.draft_slots;
  const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>({tokens, budget_, input, room}));
  return kv_.split(request, computed, most);
}

// Most prompt tokens of one request in a step. Since v0.31 the cap is off for a lone request, which starves no other.
std::uint32_t Scheduler::prefill_cap() const {
  const std::size_t requests = running_.size() + waiting_.size() + counts_.parked;
  if (config_.long_prefill_token_threshold == 0 || (!config_.caps_lone_prefill && requests <= 1)) {
    return VllmConfig::kUnlimited;
  }
  if (!config_.long_prefill_token_threshold_adaptive) return config_.long_prefill_token_threshold;
  const std::size_t share = config_.max_num_batched_tokens / std::max<std::size_t>(requests, 1);
  return std::max(config_.long_prefill_token_threshold, static_cast<std::uint32_t>(share));
}

void Scheduler::charge(std::uint32_t tokens) noexcept {
  budget_ -= tokens;
  input_budget_ -= tokens + config_.speculation.draft_slots;
}

// ── Preemption ──

// The position in running of the request that gives way.
std::size_t Scheduler::choose_victim() const {
  if (config_.policy == SchedulingPolicy::Fcfs) {
    return config_.preemption_mode == PreemptionMode::Lifo ? running_.size() - 1 : 0;
  }
  std::size_t worst = 0;
  for (std::size_t i = 1; i < running_.size(); ++i) {
    const RequestSpec& a = requests_[running_[worst]].spec;
    const RequestSpec& b = requests_[running_[i]].spec;
    if (std::tie(a.priority, a.arrival_time) < std::tie(b.priority, b.arrival_time)) worst = i;
  }
  return worst;
}

void Scheduler::preempt_request(std::size_t position, RequestId by, std::int64_t now_ns) {
  const RequestSlot slot = running_[position];
  EngineRequest& victim = requests_[slot];
  UNDERSTUDY_ASSERT(victim.status == RequestStatus::Running, "only running requests are preempted");
  if (tiers_ != nullptr) tiers_->stop_waiting(slot, now_ns);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(position));
  if (unschedule(log_, slot)) kv_.withdraw(victim, config_.phantom_hits);
  connector_.handle_preemption(victim);
  std::erase(prefills_in_flight_, slot);
  if (connector_.requires_kv_delivery()) drop_in_flight(victim);
  free_blocks(victim);
  victim.num_computed_tokens = 0;
  victim.ahead = 0;
  victim.drafts = 0;
  victim.status = RequestStatus::Preempted;
  ++victim.record.preemptions;
  ++totals_.preemptions;
  waiting_.push(slot, true);
  log_.preempted.push_back(victim.id);
  log_.preempted_for.push_back(by);
}

// Take a request out of the decision. False: it has no tokens in it.
bool Scheduler::unschedule(StepLog& log, RequestSlot slot) {
  const auto turn = std::ranges::find(log.scheduled, slot, &Scheduled::slot);
  if (turn == log.scheduled.end()) return false;
  budget_ += turn->tokens;
  input_budget_ += turn->tokens + config_.speculation.draft_slots;
  log.scheduled.erase(turn);
  return true;
}

// An output in flight of a request that is preempted: a producer computes and samples it again.
void Scheduler::drop_in_flight(const EngineRequest& victim) {
  for (Scheduled& turn : planned_.turns) {
    if (turn.id == victim.id) turn.samples = false;
  }
}

// ── The decision ──

void Scheduler::suspend(std::int64_t now_ns) {
  for (const Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    if (turn.drafts > 0 && !turn.blank) request.drafts = config_.speculation.tokens;
    kv_.withdraw(request, false);
  }
  kv_.end_schedule();
  suspended_ = {now_ns, std::move(log_)};
  log_.clear();
}

// Names that were withdrawn are given again, in the same order.
void Scheduler::continue_schedule(std::int64_t now_ns) {
  log_ = std::move(suspended_->log);
  suspended_.reset();
  refusal_ = {};
  std::vector<RequestSlot> lost;
  for (const Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    const std::uint32_t end = request.num_computed_tokens + turn.tokens;
    if (kv_.grow(request, end, end, now_ns) != Room::Taken) lost.push_back(turn.slot);
    if (!turn.blank) request.drafts = 0;
  }
  for (const RequestSlot slot : lost) (void)unschedule(log_, slot);
}

void Scheduler::update_after_schedule(std::int64_t now_ns) {
  suspended_.reset();
  for (Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    turn.before = request.num_computed_tokens;
    request.num_computed_tokens += turn.tokens;
    turn.samples = request.num_computed_tokens >= request.known + request.ahead;
    request.prefilling = !turn.samples;
    if (turn.samples && !prefills_in_flight_.empty()) std::erase(prefills_in_flight_, turn.slot);
    if (!turn.samples || !config_.async_scheduling) continue;
    request.ahead += 1 + turn.drafts;
    request.drafts = config_.speculation.tokens;  // whatever they will be
  }
  ++counts_.schedules;
  counts_.fruitless_preemptions += log_.preempted.size() - preempted_before_;
  if (tiers_ != nullptr) {
    refusal_.released = tiers_->released();
    refusal_.loads_ended = tiers_->loads_ended();
  }
  interval_.end(!log_.scheduled.empty());
  if (connects_) build_connector_meta(now_ns);
  release_copies();
  log_.free_after_schedule = kv_.available();
}

// Report the scheduled requests to the connector, and collect its orders to the worker.
void Scheduler::build_connector_meta(std::int64_t now_ns) {
  const std::size_t admitted = log_.admitted.size() - admitted_before_;
  const std::size_t first_admitted = log_.scheduled.size() - admitted;
  if (!log_.scheduled.empty()) ++steps_.scheduled;
  for (std::size_t i = 0; i < log_.scheduled.size(); ++i) {
    EngineRequest& request = requests_[log_.scheduled[i].slot];
    const bool fresh = i >= first_admitted;
    connector_.on_scheduled({request, fresh, fresh && log_.resumed[admitted_before_ + i - first_admitted]});
    request.last_step = steps_.scheduled;
  }
  counts_.has_ended = false;
  orders_.meta = connector_.build_connector_meta(now_ns);
  orders_.output = {};
  connector_.poll(orders_.output, now_ns);
  totals_.expired_leases += orders_.output.expired;
}

// Release the blocks that the schedule's copies read and wrote, or defer it until a step has run them.
void Scheduler::release_copies() {
  const std::uint64_t step = steps_.scheduled + (log_.scheduled.empty() ? 1 : 0);
  if (!config_.offload || freeable(step)) return kv_.end_schedule();
  std::vector<SlotId> blocks = kv_.end_schedule_later();
  std::ranges::reverse(blocks);
  if (!blocks.empty()) left_.deferred.push_back({step, {std::move(blocks), {}}});
}

}  // namespace understudy
