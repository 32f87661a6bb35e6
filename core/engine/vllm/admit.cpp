// The second half of a schedule: admissions from the heads of the queues, in order. Requests that wait for a transfer,
// or whose adapter has no place in the batch, are skipped.
#include <algorithm>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

// Returns whether requests are left in the queues, apart from those that were skipped.
bool VllmEngine::admit(std::int64_t now_ns) {
  if (config_.max_loras != VllmConfig::kUnlimited) note_adapters();
  const auto put_back = [this] {
    // A transfer may end, and an adapter leave the batch, at any time.
    if (queues_.put_back([this](RequestSlot slot) { return kv_->holds(requests_[slot]); })) refusal_.stands = false;
  };
  try {
    admit_waiting(now_ns);
  } catch (...) {  // user-defined policy
    put_back();
    throw;
  }
  const bool left = admitting_ && !queues_.empty();
  put_back();
  return left;
}

// A head that may not continue ends the loop; one that waits for a transfer or an adapter is set aside; one that passes
// all checks runs.
void VllmEngine::admit_waiting(std::int64_t now_ns) {
  const bool decodes_only = only_decodes();
  const bool joins = !log_.scheduled.empty();
  while (can_add() && running_.size() < max_running()) {
    WaitingQueue* const queue = queues_.next(admitting_);
    if (queue == nullptr) return;
    EngineRequest& request = requests_[queue->head()];
    if (!can_try(request, now_ns)) {
      queues_.skip(*queue);
      continue;
    }
    const bool holds = kv_->holds(request);  // its load has ended
    if (!holds && tiers_ && tiers_->waiting(request.slot)) {
      refusal_.stands = true;
      return;
    }
    // A preempted request waits until batches with its tokens have left the pipeline.
    if (lacks_adapter(request) || request.in_flight > 0) {
      queues_.skip(*queue);
      continue;
    }
    Admission head = holds ? loaded_head(request, now_ns) : look_up(request.slot);
    if (!holds) {
      const std::optional<std::uint32_t> external = external_tokens(head, now_ns);
      request.wants_load = external.value_or(0) > 0;
      if (request.wants_load && !place_load(head, *external, now_ns)) {
        refusal_.no_room = true;
        return;
      }
      if (external != 0u) {
        queues_.skip(*queue);
        continue;
      }
    }
    if (interval_.defers() && computes_prompt(head)) return;
    if (!size_up(head, decodes_only, joins)) return;
    if (head.too_long || !(holds ? fits_behind(head) : fits(head))) {
      if (!head.too_long && yield_hold(now_ns)) continue;
      return refuse(head);
    }
    if (tiers_ && !offload_ && !holds) {  // a prompt that no other worker has computed
      const WorkerTiers::Onboard loading = onboard(head, now_ns);
      if (loading == WorkerTiers::Onboard::Parked) {
        queue->pop();
        park(request);
        continue;
      }
      refusal_.stands = loading == WorkerTiers::Onboard::Retry;
      if (refusal_.stands) return;
      head.slow_load = loading == WorkerTiers::Onboard::Slow;
    }
    const std::uint32_t room = room_up_to(request, head.total(), true);
    if ((holds ? kv_->grow(request, room, head.total(), now_ns)
               : kv_->place(request, head.hit, room, head.total(), now_ns)) != Room::Taken) {
      if (!holds && yield_hold(now_ns)) continue;
      refusal_.stands = grouped_ == nullptr;
      refusal_.no_room = true;
      return;
    }
    queue->pop();
    enter(head, now_ns);
  }
}

// Whether the schedule may look at the request: its load has ended, if there was one.
bool VllmEngine::can_try(EngineRequest& request, std::int64_t now_ns) {
  if (!admitting_ && !kv_->holds(request)) return false;
  if (request.status != RequestStatus::Loading) return true;
  if (!request.loaded) return false;
  if (request.load_failed) {
    give_up_load(request);
  } else {
    promote(request, now_ns);
  }
  return true;
}

// The adapters in the batch.
void VllmEngine::note_adapters() {
  adapters_.clear();
  if (config_.counts_running_loras) {
    for (const RequestSlot slot : running_) note_adapter(requests_[slot]);
  } else {
    for (const Scheduled& turn : log_.scheduled) note_adapter(requests_[turn.slot]);
  }
}

void VllmEngine::note_adapter(const EngineRequest& request) {
  const std::uint32_t adapter = request.spec.adapter;
  if (adapter == 0 || std::ranges::find(adapters_, adapter) != adapters_.end()) return;
  adapters_.push_back(adapter);
}

// Whether the batch is full of others.
bool VllmEngine::lacks_adapter(const EngineRequest& request) const {
  const std::uint32_t adapter = request.spec.adapter;
  return adapter != 0 && adapters_.size() >= config_.max_loras &&
         std::ranges::find(adapters_, adapter) == adapters_.end();
}

// Whether no prompt is scheduled, so that all entries verify drafts.
bool VllmEngine::only_decodes() const {
  if (config_.speculation.tokens == 0) return false;
  return std::ranges::none_of(log_.scheduled,
                              [this](const Scheduled& turn) { return requests_[turn.slot].prefilling; });
}

// Find the request's cached blocks on the device.
Admission VllmEngine::look_up(RequestSlot slot) {
  EngineRequest& request = requests_[slot];
  Admission head;
  head.slot = slot;
  if (!config_.enable_prefix_caching) return head;
  // At least one token is left to compute; and a block has a key once the tokens that are part of it are known.
  const std::uint32_t most = request.known - std::min(request.known, std::max(1u, config_.speculation.hashed_ahead));
  if (grouped_ != nullptr) {
    head.limit = most;
    head.hit = kv_->find(request, most);
    head.hit_tokens = head.hit.tokens - std::min(head.hit.tokens, grouped_->replay());
    return head;
  }
  head.limit = most - most % config_.block_size;
  head.hit = kv_->find(request, head.limit);
  // The draft needs hidden states that the cache does not hold: the last block found is computed again.
  if ((bursts_.on() || config_.speculation.drops_last_hit) && head.hit.tokens > 0) {
    head.hit = kv_->find(request, head.hit.tokens - 1);
  }
  head.hit_tokens = head.hit.tokens;
  return head;
}

// Set the tokens that the head computes in this step. False: its one token would need padding, and the budget has no
// room for it.
bool VllmEngine::size_up(Admission& head, bool decodes_only, bool joins) const {
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
  if (grouped_ == nullptr || head.tokens == 0) return true;
  // vLLM counts from the end of the hit, also where a part of it is computed again.
  head.tokens = grouped_->split(request, std::max(head.hit_tokens, head.hit.tokens), head.tokens);
  return head.tokens > 0;
}

bool VllmEngine::fits(const Admission& head) {
  EngineRequest& request = requests_[head.slot];
  const std::uint64_t free = kv_->available();
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (config_.scheduler_reserve_full_isl) {
    const std::uint64_t whole = grouped_ != nullptr ? grouped_->whole_cost(request, head.hit, request.known)
                                                    : kv_->beyond(head.hit, request.known) + head.hit.unreferenced;
    const std::uint64_t needs = whole + watermark;
    if (needs > free) {
      refusal_.lacks = needs - free;
      refusal_.needs = needs;
      return false;
    }
  }
  const std::uint64_t needs = kv_->cost(request, head.hit, room_up_to(request, head.total(), true)) + watermark;
  // States split a prompt by the budget, and a chunk of another length may need less.
  if (grouped_ != nullptr && !grouped_->layout().has_states) refusal_.needs = needs;
  return needs <= free;
}

// Leave the head in the queue; record whether the refusal stays valid for the next steps.
void VllmEngine::refuse(const Admission& head) {
  refusal_.no_room = !head.too_long;
  if (grouped_ != nullptr) {
    // Until blocks that windows leave behind suffice, a part of the hit is evicted, or keys are added that it may find.
    refusal_.stands = !tiers_ && !head.too_long && refusal_.needs > 0 && refusal_.needs < GroupedBackend::kImpossible;
    if (refusal_.stands) refusal_.evictions = grouped_->evictions_until_lost();
    return;
  }
  // While the others decode, free blocks only decrease, whatever the eviction order: each block taken is one fewer
  // free, and reduces what this request needs by at most one, because an evicted hit and the hits behind it must be
  // computed. The budget, however, may have been used by prompts of this step only. Asynchronously, a request whose
  // last token is in flight uses no budget.
  refusal_.stands =
      !head.too_long || (!config_.async_scheduling && head.wanted + running_.size() > config_.max_num_batched_tokens);
  // A hit that is evicted takes those behind it along, and a chunk without them may need less than it did.
  if (head.hit.unreferenced > 0 && !config_.scheduler_reserve_full_isl) refusal_.stands = false;
  refusal_.wants_block = head.hit.tokens < head.limit;
  if (refusal_.wants_block) {
    refusal_.missing = kv_->hash_of(requests_[head.slot], head.hit.tokens / config_.block_size);
  }
}

// Move the head, which has its blocks, to the running list.
void VllmEngine::enter(const Admission& head, std::int64_t now_ns) {
  EngineRequest& request = requests_[head.slot];
  const bool resumed = request.status == RequestStatus::Preempted;
  UNDERSTUDY_ASSERT(request.status != RequestStatus::Running, "a request is admitted once");
  connector_->update_state_after_alloc(request, head.hit_tokens, 0, now_ns);
  UNDERSTUDY_ASSERT(head.hit_tokens < request.known, "an admission leaves a token to compute");
  running_.push_back(head.slot);
  request.status = RequestStatus::Running;
  request.computed = head.hit_tokens;
  if (computes_prompt(head)) interval_.carry();
  note_adapter(request);
  if (!resumed) {
    request.record.first_admit_ns = now_ns;
    request.record.cached_first = head.hit_tokens;
  }
  request.record.cached_total += head.hit_tokens;
  request.record.looked_up += request.known;
  totals_.phantom_hit_blocks += kv_->phantoms(head.hit);
  if (grouped_ != nullptr) {
    // The lookup of a request that loaded blocks was counted when the load began.
    if (!head.has_loaded) grouped_->count_lookup(request.known, head.hit.tokens, resumed);
    const std::uint32_t loaded = head.hit_tokens > 0 ? head.hit_tokens + grouped_->replay() : 0;
    grouped_->count_admission(request, head.has_loaded ? loaded : head.hit.tokens);
  }
  if (tiers_) count_origins(head, resumed);
  if (head.slow_load) tiers_->note_slow();
  if (request.loaded_tokens > 0) count_loaded(request, resumed);
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
std::uint32_t VllmEngine::room_up_to(const EngineRequest& request, std::uint32_t total, bool admission) const noexcept {
  std::uint32_t more = 0;
  if (bursts_.on() && total >= request.known) more = std::min(bursts_.longest(), outputs_left(request));
  if (!admission || config_.speculation.admission_lookahead) {
    more += std::min(config_.speculation.lookahead, config_.max_model_len - std::min(total, config_.max_model_len));
  }
  return total + more;
}

}  // namespace understudy
