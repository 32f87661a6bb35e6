// The second half of a schedule: admissions from the heads of the queues, in order. Requests that wait for a transfer,
// or whose adapter has no place in the batch, are skipped.
#include <algorithm>

#include "base/assert.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

void Scheduler::admit(std::int64_t now_ns) {
  if (config_.max_loras != VllmConfig::kUnlimited) note_adapters();
  const auto put_back = [this] {
    // A transfer may end, and an adapter leave the batch, at any time.
    if (waiting_.put_back([this](RequestSlot slot) { return kv_.holds(requests_[slot]); })) refusal_.stands = false;
  };
  try {
    schedule_waiting(now_ns);
  } catch (...) {  // user-defined policy
    put_back();
    throw;
  }
  const bool left = admitting_ && !waiting_.empty();
  put_back();
  interval_.admitted(left);
}

// ── Phase 2: the queues ──

// A head that may not continue ends the loop; one that waits for a transfer or an adapter is set aside; one that passes
// all checks runs.
void Scheduler::schedule_waiting(std::int64_t now_ns) {
  const bool decodes_only = only_decodes();
  const bool joins = !log_.scheduled.empty();
  while (has_budget() && running_.size() < max_running()) {
    WaitingQueue* const queue = waiting_.next(admitting_);
    if (queue == nullptr) return;
    EngineRequest& request = requests_[queue->head()];
    if (!try_promote(request, now_ns)) {
      waiting_.skip(*queue);
      continue;
    }
    if (waits_for_copies(request)) return;
    // A preempted request waits until batches with its tokens have left the pipeline.
    if (lacks_adapter(request) || request.in_flight > 0) {
      waiting_.skip(*queue);
      continue;
    }
    Admission head = get_computed_blocks(request, now_ns);
    switch (load_from_connector(head, now_ns)) {
      case Load::None:
        break;
      case Load::Begun:
        waiting_.skip(*queue);
        continue;
      case Load::NoRoom:
        return;
    }
    if (interval_.defers() && computes_prompt(head)) return;
    if (!size_up(head, decodes_only, joins)) return;
    if (head.too_long || !fits(head)) {
      if (!head.too_long && yield_hold(now_ns)) continue;
      return refuse(head);
    }
    switch (load_from_tiers(head, now_ns)) {
      case Load::None:
        break;
      case Load::Begun:
        queue->pop();
        park(request);
        continue;
      case Load::NoRoom:
        return;
    }
    if (allocate_slots(head, now_ns) != Room::Taken) {
      if (!head.has_loaded && yield_hold(now_ns)) continue;
      return refuse_room();
    }
    queue->pop();
    enter(head, now_ns);
  }
}

// Whether the schedule may look at the request: its load has ended, if there was one (vLLM:
// _try_promote_blocked_waiting_request).
bool Scheduler::try_promote(EngineRequest& request, std::int64_t now_ns) {
  if (!admitting_ && !kv_.holds(request)) return false;
  if (request.status != RequestStatus::Loading) return true;
  if (!request.loaded) return false;
  if (request.load_failed) {
    give_up_load(request);
  } else {
    update_waiting_for_remote_kv(request, now_ns);
  }
  return true;
}

// Find the request's cached blocks on the device, or those that were loaded for it.
Admission Scheduler::get_computed_blocks(EngineRequest& request, std::int64_t now_ns) {
  if (kv_.holds(request)) return loaded_head(request, now_ns);
  Admission head;
  head.slot = request.slot;
  if (!config_.enable_prefix_caching) return head;
  // At least one token is left to compute; and a block has a key once the tokens that are part of it are known.
  const std::uint32_t most = request.known - std::min(request.known, std::max(1u, config_.speculation.hashed_ahead));
  head.limit = most - most % lookup_unit_;
  head.hit = kv_.find(request, head.limit);
  // The draft needs hidden states that the cache does not hold: the last block found is computed again.
  if ((bursts_.on() || config_.speculation.drops_last_hit) && head.hit.tokens > 0) {
    head.hit = kv_.find(request, head.hit.tokens - 1);
  }
  head.hit_tokens = head.hit.tokens - std::min(head.hit.tokens, kv_.replay());
  return head;
}

// Set the tokens that the head computes in this step. False: its one token would need padding, and the budget has no
// room for it.
bool Scheduler::size_up(Admission& head, bool decodes_only, bool joins) const {
  const EngineRequest& request = requests_[head.slot];
  const Speculation& speculation = config_.speculation;
  const std::uint32_t drafts = speculation.tokens;
  const std::uint64_t budget = std::min(budget_, input_budget_ - config_.speculation.draft_slots);
  // Among decodes that all verify drafts, one token to compute is made as many, or waits.
  head.padded = decodes_only && speculation.pads_admissions && request.known - head.hit_tokens == 1 &&
                (joins || (speculation.pads_hits && head.hit_tokens > 0));
  if (head.padded) {
    const std::uint64_t end = std::uint64_t{head.hit_tokens} + 1 + drafts;
    if (speculation.pads_within_context) {
      head.padded = end < config_.max_model_len;  // and the token that is sampled
    } else if (end > config_.max_model_len) {
      return false;
    }
    if (head.padded && 1 + drafts > budget) return false;
  }
  head.wanted = std::min(head.padded ? 1 + drafts : request.known - head.hit_tokens, prefill_cap_);
  head.tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(head.wanted, budget));
  head.too_long = !config_.enable_chunked_prefill && head.wanted > budget;
  if (head.tokens == 0) return true;
  // vLLM counts from the end of the hit, also where a part of it is computed again.
  head.tokens = kv_.split(request, std::max(head.hit_tokens, head.hit.tokens), head.tokens);
  return head.tokens > 0;
}

KvBackend::Room Scheduler::allocate_slots(const Admission& head, std::int64_t now_ns) {
  EngineRequest& request = requests_[head.slot];
  const std::uint32_t room = room_up_to(request, head.total(), true);
  return head.has_loaded ? kv_.grow(request, room, head.total(), now_ns)
                         : kv_.place(request, head.hit, room, head.total(), now_ns);
}

// Move the head, which has its blocks, to the running list.
void Scheduler::enter(const Admission& head, std::int64_t now_ns) {
  EngineRequest& request = requests_[head.slot];
  const bool resumed = request.status == RequestStatus::Preempted;
  UNDERSTUDY_ASSERT(request.status != RequestStatus::Running, "a request is admitted once");
  connector_.update_state_after_alloc(request, head.hit_tokens, 0, now_ns);
  UNDERSTUDY_ASSERT(head.hit_tokens < request.known, "an admission leaves a token to compute");
  running_.push_back(head.slot);
  request.status = RequestStatus::Running;
  request.num_computed_tokens = head.hit_tokens;
  if (computes_prompt(head)) interval_.carry();
  note_adapter(request);
  if (!resumed) {
    request.record.first_admit_ns = now_ns;
    request.record.cached_first = head.hit_tokens;
  }
  request.record.cached_total += head.hit_tokens;
  request.record.looked_up += request.known;
  count_hits(head, resumed);
  if (head.total() < request.known && !std::ranges::count(prefills_in_flight_, head.slot)) {
    prefills_in_flight_.push_back(head.slot);
  }
  log_.admitted.push_back(request.id);
  log_.resumed.push_back(resumed);
  log_.cached.push_back(head.hit_tokens);
  const std::uint32_t drafts = head.padded ? head.tokens - 1 : 0;
  log_.scheduled.push_back({head.slot, head.tokens, 0, false, request.id, drafts, head.padded});
  charge(head.tokens);
}

// Tokens that an entry of the batch needs room for when it ends at `total`: also its longest burst, if it samples, and
// the drafter's lookahead.
std::uint32_t Scheduler::room_up_to(const EngineRequest& request, std::uint32_t total, bool admission) const noexcept {
  std::uint32_t more = 0;
  if (bursts_.on() && total >= request.known) more = std::min(bursts_.longest(), outputs_left(request));
  if (!admission || config_.speculation.admission_lookahead) {
    more += std::min(config_.speculation.lookahead, config_.max_model_len - std::min(total, config_.max_model_len));
  }
  return total + more;
}

// Whether no prompt is scheduled, so that all entries verify drafts.
bool Scheduler::only_decodes() const {
  if (config_.speculation.tokens == 0) return false;
  return std::ranges::none_of(log_.scheduled,
                              [this](const Scheduled& turn) { return requests_[turn.slot].prefilling; });
}

// ── Adapters in the batch ──

void Scheduler::note_adapters() {
  adapters_.clear();
  if (config_.counts_running_loras) {
    for (const RequestSlot slot : running_) note_adapter(requests_[slot]);
  } else {
    for (const Scheduled& turn : log_.scheduled) note_adapter(requests_[turn.slot]);
  }
}

void Scheduler::note_adapter(const EngineRequest& request) {
  const std::uint32_t adapter = request.spec.adapter;
  if (adapter == 0 || std::ranges::find(adapters_, adapter) != adapters_.end()) return;
  adapters_.push_back(adapter);
}

// Whether the batch is full of others.
bool Scheduler::lacks_adapter(const EngineRequest& request) const {
  const std::uint32_t adapter = request.spec.adapter;
  return adapter != 0 && adapters_.size() >= config_.max_loras &&
         std::ranges::find(adapters_, adapter) == adapters_.end();
}

}  // namespace understudy
