// The scheduling half of a step: the running list, then (admit.cpp) the queue.
#include <algorithm>
#include <tuple>
#include <utility>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

// Decides on a batch, and returns how long it takes.
std::int64_t VllmEngine::schedule(std::int64_t now_ns) {
  log_.scheduled.clear();
  const bool has_preempted = std::exchange(refusal_, {}).has_preempted;
  budget_ = config_.max_num_batched_tokens - config_.speculation.reserved_slots;
  input_budget_ = config_.max_num_batched_tokens;
  prefill_cap_ = prefill_cap();
  interval_.begin(config_.prefill_schedule_interval, running_, requests_);
  if (grouped_ != nullptr) grouped_->begin_schedule();
  const std::size_t preempted_before = log_.preempted.size();
  const std::size_t admitted_before = log_.admitted.size();
  std::int64_t duration_ns = 0;
  bool admitting = false;
  try {
    schedule_running(now_ns);
    admitting = true;
    if (!has_preempted && log_.preempted.size() == preempted_before) {
      const bool left = admit(now_ns);
      interval_.admitted(left);
    }
    if (tiers_) {
      refusal_.released = tiers_->released();
      refusal_.loads_ended = tiers_->loads_ended();
    }
    measure();
    duration_ns = timing_.duration_ns(load_, capacity_tokens_);
  } catch (...) {  // user-defined policy or timing model
    refusal_.has_preempted = has_preempted || log_.preempted.size() > preempted_before;
    undo_schedule();
    if (grouped_ != nullptr) grouped_->end_schedule();
    failed_ = {now_ns, std::move(log_.scheduled), admitting};
    log_.clear();
    throw;
  }
  failed_.reset();
  for (Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    turn.before = request.computed;
    request.computed += turn.tokens;
    turn.samples = request.computed >= request.known + request.ahead;
    request.prefilling = !turn.samples;
    if (turn.samples && !prefills_in_flight_.empty()) std::erase(prefills_in_flight_, turn.slot);
    if (!turn.samples || !config_.async_scheduling) continue;
    request.ahead += 1 + turn.drafts;
    request.drafts = config_.speculation.tokens;  // whatever they will be
  }
  UNDERSTUDY_ASSERT(budget_ <= config_.max_num_batched_tokens, "a schedule stays within the budget of tokens");
  UNDERSTUDY_ASSERT(running_.size() <= config_.max_num_seqs, "no more requests run than max_num_seqs");
  interval_.end(!log_.scheduled.empty());
  if (connected_) close_connector(admitted_before, now_ns);
  if (grouped_ != nullptr) end_group_schedule();
  log_.free_after_schedule = kv_->available();
  fruitless_preemptions_ += log_.preempted.size() - preempted_before;
  if (grouped_ != nullptr && tiers_ && !offload_ && log_.scheduled.empty() &&
      log_.preempted.size() > preempted_before && tiers_->g1_references() > 0) {
    released_before_ = tiers_->released();
  }
  return duration_ns;
}

// Undo the schedule: its tokens are not computed. Admitted requests stay admitted, with their blocks; names given in
// this schedule are withdrawn.
void VllmEngine::undo_schedule() {
  for (const Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    if (turn.drafts > 0 && !turn.blank) request.drafts = config_.speculation.tokens;
    kv_->withdraw(request, false);
  }
}

// The tokens of a request in the schedule that is retried. They do not follow from the budget: requests that the first
// attempt preempted had a part of it.
const Scheduled* VllmEngine::scheduled_before(RequestId id) const {
  const auto found = std::ranges::find(failed_->scheduled, id, &Scheduled::id);
  return found == failed_->scheduled.end() ? nullptr : &*found;
}

// ── Phase 1: the running list, in order, without rotation ──

void VllmEngine::schedule_running(std::int64_t now_ns) {
  std::size_t cursor = 0;
  while (cursor < running_.size() && can_add()) {
    const RequestSlot id = running_[cursor];
    if (cursor + 1 < running_.size()) requests_[running_[cursor + 1]].warm();
    EngineRequest& request = requests_[id];
    const Scheduled* const before = failed_ ? scheduled_before(request.id) : nullptr;
    const bool skipped = (tiers_ && tiers_->waiting(id)) || (failed_ && failed_->admitting && before == nullptr) ||
                         (interval_.defers() && request.prefilling);
    const std::uint32_t tokens = skipped ? 0 : (before != nullptr ? before->tokens : next_tokens(request));
    if (tokens == 0) {
      ++cursor;
      continue;
    }
    const std::uint32_t end = request.computed + tokens;
    const std::uint32_t wanted = room_up_to(request, end, false);
    Room room = Room::Short;
    bool itself = false;
    while (!itself && (room = kv_->grow(request, wanted, end, now_ns)) == Room::Short) {
      if (yield_hold(now_ns)) continue;
      const std::size_t victim = choose_victim();
      const bool spares = loads_ && (!offload_ || config_.offload->spares_in_flight);
      if (spares && !freeable(requests_[running_[victim]].last_step)) return;
      itself = running_[victim] == id;
      if (victim < cursor) --cursor;
      if (tiers_) tiers_->stop_waiting(running_[victim], now_ns);
      preempt(victim, request.id);
      if (itself && config_.self_preemption_ends) return;
    }
    if (itself) continue;  // the cursor is at the next request
    if (room == Room::Wait) {
      ++cursor;
      continue;
    }
    const std::uint32_t real = request.known + request.ahead;
    const bool blank = before != nullptr && before->blank;
    log_.scheduled.push_back({id, tokens, 0, false, request.id, end > real ? end - real : 0, blank});
    request.drafts = 0;
    if (request.prefilling) interval_.carry();
    charge(tokens);
    ++cursor;
  }
}

std::uint32_t VllmEngine::next_tokens(const EngineRequest& request) const {
  const std::uint64_t end = std::uint64_t{request.spec.prompt_tokens} + request.spec.max_tokens;
  if (request.ahead > 0 && std::uint64_t{request.computed} + 2 - request.ahead >= end)
    return 0;  // the last token is in flight
  if (pipeline_ && pipeline_->schedules() + 1 < request.eligible_at) return 0;
  const std::uint32_t tokens =
      std::min(request.known + request.drafts + request.ahead - request.computed, prefill_cap_);
  const std::uint32_t room = config_.max_model_len - std::min(request.computed + 1, config_.max_model_len);
  const std::uint64_t input = input_budget_ - config_.speculation.draft_slots;
  const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>({tokens, budget_, input, room}));
  return grouped_ == nullptr ? most : grouped_->split(request, request.computed, most);
}

// Most prompt tokens of one request in a step. Since v0.31 the cap is off for a lone request, which starves no other.
std::uint32_t VllmEngine::prefill_cap() const {
  const std::size_t requests = running_.size() + num_waiting() + parked_;
  if (config_.long_prefill_token_threshold == 0 || (!config_.caps_lone_prefill && requests <= 1)) {
    return VllmConfig::kUnlimited;
  }
  if (!config_.long_prefill_token_threshold_adaptive) return config_.long_prefill_token_threshold;
  const std::size_t share = config_.max_num_batched_tokens / std::max<std::size_t>(requests, 1);
  return std::max(config_.long_prefill_token_threshold, static_cast<std::uint32_t>(share));
}

// The position in running of the request that gives way.
std::size_t VllmEngine::choose_victim() const {
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

void VllmEngine::preempt(std::size_t position, RequestId by) {
  const RequestSlot id = running_[position];
  EngineRequest& victim = requests_[id];
  UNDERSTUDY_ASSERT(victim.status == RequestStatus::Running, "only running requests are preempted");
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(position));
  const auto turn =
      std::find_if(log_.scheduled.begin(), log_.scheduled.end(), [id](const Scheduled& s) { return s.slot == id; });
  if (turn != log_.scheduled.end()) {
    budget_ += turn->tokens;
    input_budget_ += turn->tokens + config_.speculation.draft_slots;
    log_.scheduled.erase(turn);
    kv_->withdraw(victim, config_.phantom_hits);
  }
  connector_->handle_preemption(victim);
  std::erase(prefills_in_flight_, victim.slot);
  if (connector_->requires_kv_delivery()) drop_in_flight(victim);
  release_or_defer(victim);
  victim.computed = 0;
  victim.ahead = 0;
  victim.drafts = 0;
  victim.status = RequestStatus::Preempted;
  ++victim.record.preemptions;
  ++totals_.preemptions;
  queues_.push(id, true);
  log_.preempted.push_back(victim.id);
  log_.preempted_for.push_back(by);
}

// ── Load of the batch ──

// Measure the scheduled batch into load_.
void VllmEngine::measure() {
  load_.clear();
  MockerLoad& load = load_.mocker;
  const std::uint64_t window = timing_.model->window();
  for (const Scheduled& turn : log_.scheduled) {
    const EngineRequest& request = requests_[turn.slot];
    const std::uint32_t prompt = request.spec.prompt_tokens;
    if (request.computed < prompt) {
      ++load.prefill_requests;
      load.prefill_input_tokens += std::min(request.computed + turn.tokens, prompt);
      load.prefill_cached_tokens += request.computed;
    }
    const std::uint32_t length = request.known + request.ahead;
    const bool decodes = request.computed >= prompt || timing_.charges_first_token;
    if (decodes && request.computed + turn.tokens >= length && request.spec.max_tokens > 0) {
      ++load.decode_requests;
      load.decode_context_tokens += length;
    }
    ++load_.requests;
    load_.tokens += turn.tokens;
    load_.drafts += turn.drafts;
    if (request.computed < prompt || turn.tokens > 1 + turn.drafts) {
      load_.chunks.push_back({turn.tokens, request.computed});
    } else {
      load_.add_decode(request.computed + turn.tokens, window, turn.drafts);
    }
  }
}

void VllmEngine::charge(std::uint32_t tokens) noexcept {
  budget_ -= tokens;
  input_budget_ -= tokens + config_.speculation.draft_slots;
}

}  // namespace understudy
