// The scheduling half of a step: the running list, admissions, and the blocks of a request.
#include <algorithm>
#include <tuple>

#include "engine/vllm/engine.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kPrivateSeed = 0x6B76626DULL;

}  // namespace

// Decides on a batch, and returns how long it takes.
std::int64_t VllmEngine::schedule(std::int64_t now_ns) {
  log_.scheduled.clear();
  blocked_ = {};
  budget_ = config_.max_num_batched_tokens - config_.speculation.reserved_slots;
  input_budget_ = config_.max_num_batched_tokens;
  prefill_cap_ = prefill_cap();
  const std::size_t preempted_before = log_.preempted.size();
  schedule_running(now_ns);
  if (log_.preempted.size() == preempted_before) admit(now_ns);
  if (tiers_) blocked_.released = tiers_->released();
  load_ = measure();
  std::int64_t duration_ns = 0;
  try {
    duration_ns = timing_.duration_ns(load_, capacity_tokens_);
  } catch (...) {  // a model of the user's
    undo_schedule();
    throw;
  }
  for (Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    turn.before = request.computed;
    request.computed += turn.tokens;
    turn.samples = request.computed >= request.known + request.ahead;
    request.prefilling = !turn.samples;
    if (!turn.samples || !config_.async_scheduling) continue;
    request.ahead += 1 + turn.drafts;
    request.drafts = config_.speculation.tokens;  // whatever they will be
  }
  log_.free_after_schedule = store_.available(0);
  fruitless_preemptions_ += log_.preempted.size() - preempted_before;
  return duration_ns;
}

// Nobody computes what was scheduled. Those admitted stay so, with their blocks; keys of blocks that are not computed
// go (not under kvbm, where what is acquired is visible).
void VllmEngine::undo_schedule() {
  for (const Scheduled& turn : log_.scheduled) {
    EngineRequest& request = requests_[turn.slot];
    if (turn.drafts > 0 && !turn.blank) request.drafts = config_.speculation.tokens;
    if (shared_ || request.keyed == request.keyed_before) continue;
    store_.unregister(
        0, std::span<const SlotId>(request.table).subspan(request.keyed_before, request.keyed - request.keyed_before));
    request.keyed = request.keyed_before;
  }
  log_.clear();
}

// ── Phase 1: the running list, in order; nobody rotates ──

void VllmEngine::schedule_running(std::int64_t now_ns) {
  std::size_t cursor = 0;
  while (cursor < running_.size() && can_add()) {
    const RequestSlot id = running_[cursor];
    EngineRequest& request = requests_[id];
    const std::uint32_t tokens = tiers_ && tiers_->waiting(id) ? 0 : next_tokens(request);
    if (tokens == 0) {
      ++cursor;
      continue;
    }
    const std::uint32_t keyed_before = request.keyed;
    Room room = Room::Short;
    while ((room = grow(id, request.computed + tokens, now_ns)) == Room::Short) {
      const std::size_t victim = choose_victim();
      const bool itself = running_[victim] == id;
      if (victim < cursor) --cursor;
      if (tiers_) tiers_->stop_waiting(running_[victim], now_ns);
      preempt(victim);
      if (itself) return;
    }
    if (room == Room::Wait) {
      ++cursor;
      continue;
    }
    request.keyed_before = keyed_before;
    const std::uint32_t end = request.computed + tokens;
    const std::uint32_t real = request.known + request.ahead;
    log_.scheduled.push_back({id, tokens, 0, false, request.id, end > real ? end - real : 0});
    request.drafts = 0;
    charge(tokens);
    ++cursor;
  }
}

std::uint32_t VllmEngine::next_tokens(const EngineRequest& request) const {
  const std::uint64_t end = std::uint64_t{request.spec.prompt_tokens} + request.spec.max_tokens;
  if (request.ahead > 0 && std::uint64_t{request.computed} + 2 - request.ahead >= end)
    return 0;  // its last is in flight
  const std::uint32_t tokens =
      std::min(request.known + request.drafts + request.ahead - request.computed, prefill_cap_);
  const std::uint32_t room = config_.max_model_len - std::min(request.computed + 1, config_.max_model_len);
  const std::uint64_t input = input_budget_ - config_.speculation.draft_slots;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>({tokens, budget_, input, room}));
}

// Of a prompt in one step. Since v0.31 a request that is alone has nobody to starve, and the cap is off.
std::uint32_t VllmEngine::prefill_cap() const {
  const std::size_t requests = running_.size() + waiting_.size() + parked_;
  if (config_.long_prefill_token_threshold == 0 || (!config_.caps_lone_prefill && requests <= 1)) {
    return EngineConfig::kUnlimited;
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

void VllmEngine::preempt(std::size_t position) {
  const RequestSlot id = running_[position];
  EngineRequest& victim = requests_[id];
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(position));
  const auto turn =
      std::find_if(log_.scheduled.begin(), log_.scheduled.end(), [id](const Scheduled& s) { return s.slot == id; });
  if (turn != log_.scheduled.end()) {
    // Its turn is undone, but (in versions with the defect) not the keys that its allocation registered: those blocks
    // can be hit though nobody will ever compute them.
    budget_ += turn->tokens;
    input_budget_ += turn->tokens + config_.speculation.draft_slots;
    log_.scheduled.erase(turn);
    // Not under kvbm, where what is acquired is visible, computed or not, and others may hold it by now.
    const auto fresh = std::span<const SlotId>(victim.table)
                           .subspan(victim.keyed_before, shared_ ? 0 : victim.keyed - victim.keyed_before);
    if (config_.phantom_hits) {
      phantom_.resize(config_.num_gpu_blocks);
      for (const SlotId slot : fresh) phantom_[slot] = 1;
    } else {
      store_.unregister(0, fresh);
    }
  }
  free_blocks(victim);
  victim.computed = 0;
  victim.ahead = 0;
  victim.drafts = 0;
  victim.status = RequestStatus::Preempted;
  ++victim.record.preemptions;
  ++totals_.preemptions;
  waiting_.push(id, true);
  log_.preempted.push_back(victim.id);
}

// ── Phase 2: admissions from the head of the queue; nobody overtakes ──

void VllmEngine::admit(std::int64_t now_ns) {
  const Speculation& speculation = config_.speculation;
  const bool pads =
      speculation.tokens > 0 && speculation.pads_admissions && !log_.scheduled.empty() &&
      std::ranges::none_of(log_.scheduled, [this](const Scheduled& turn) { return requests_[turn.slot].prefilling; });
  while (!waiting_.empty() && can_add() && running_.size() < max_running()) {
    const RequestSlot id = waiting_.head();
    EngineRequest& request = requests_[id];
    if (tiers_ && tiers_->waiting(id)) {
      blocked_.valid = true;
      return;
    }
    std::size_t hits = 0;
    std::size_t unreferenced = 0;
    std::size_t limit = 0;
    if (config_.enable_prefix_caching) {
      // At least one token is left to compute.
      limit = (request.known - 1) / config_.block_size;
      need_identities(request, limit);
      hits_.resize(limit);
      hits = store_.peek_prefix(0, std::span<const BlockIdentity>(request.blocks).first(limit), hits_.data(),
                                &unreferenced);
      // The draft needs hidden states that the cache does not hold: the last block found is computed again.
      if ((bursts_.on() || speculation.drops_last_hit) && hits > 0) {
        hits = store_.peek_prefix(0, std::span<const BlockIdentity>(request.blocks).first(hits - 1), hits_.data(),
                                  &unreferenced);
      }
    }
    const auto hit_tokens = static_cast<std::uint32_t>(hits * config_.block_size);
    const std::uint64_t budget = std::min(budget_, input_budget_ - speculation.draft_slots);
    // Among decodes that all verify drafts, one token to compute is made as many, or waits.
    const bool padded = pads && request.known - hit_tokens == 1;
    if (padded && (1 + speculation.tokens > budget || hit_tokens + 1 + speculation.tokens > config_.max_model_len))
      return;
    const std::uint32_t left = padded ? 1 + speculation.tokens : request.known - hit_tokens;
    const std::uint32_t wanted = std::min(left, prefill_cap_);
    const bool too_long = !config_.enable_chunked_prefill && wanted > budget;
    const auto tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, budget));
    const bool fitting = !too_long && fits(request, tokens, hits, unreferenced);
    WorkerTiers::Onboard loading = WorkerTiers::Onboard::Miss;
    if (tiers_ && fitting) loading = onboard(id, hits, limit, now_ns);
    if (loading == WorkerTiers::Onboard::Parked) continue;
    const bool retry = loading == WorkerTiers::Onboard::Retry;
    if (retry || (fitting && place(id, tokens, hits, now_ns) == Room::Wait)) {
      blocked_.valid = true;
      return;
    }
    if (!fitting) {
      // Blocks only get scarcer while the others decode; but the budget may have gone to prompts of this step alone.
      // Asynchronously, who has its last token in flight takes none of it.
      blocked_.valid =
          !too_long || (!config_.async_scheduling && wanted + running_.size() > config_.max_num_batched_tokens);
      // A hit that is evicted takes those behind it along, and a chunk without them may need less than it did.
      if (unreferenced > 0 && !config_.scheduler_reserve_full_isl) blocked_.valid = false;
      blocked_.wants_key = hits < limit;
      if (blocked_.wants_key) blocked_.missing = request.blocks[hits].lineage;
      return;
    }
    waiting_.pop();
    running_.push_back(id);
    const bool resumed = request.status == RequestStatus::Preempted;
    request.status = RequestStatus::Running;
    request.computed = hit_tokens;
    request.keyed_before = static_cast<std::uint32_t>(hits);
    if (!resumed) {
      request.record.first_admit_ns = now_ns;
      request.record.cached_first = hit_tokens;
    }
    request.record.cached_total += hit_tokens;
    request.record.looked_up += request.known;
    if (tiers_) count_origins(id, hits, resumed);
    if (loading == WorkerTiers::Onboard::Slow) tiers_->note_slow();
    if (!phantom_.empty()) {
      for (std::size_t i = 0; i < hits; ++i) totals_.phantom_hit_blocks += phantom_[hits_[i]];
    }
    log_.admitted.push_back(request.id);
    log_.resumed.push_back(resumed);
    log_.cached.push_back(hit_tokens);
    log_.scheduled.push_back({id, tokens, 0, false, request.id, padded ? tokens - 1 : 0, padded});
    charge(tokens);
  }
}

// ── Blocks ──

// Room for a running request's first `total` tokens, or nothing changed.
VllmEngine::Room VllmEngine::grow(RequestSlot id, std::uint32_t total, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  const std::uint32_t needed = blocks_for(total + burst_room(request, total) + lookahead(total, false));
  if (needed > request.table.size()) {
    if (shared_) return take_shared(id, needed, now_ns);
    const Room room = take_blocks(id, needed - request.table.size(), now_ns);
    if (room != Room::Taken) return room;
  }
  if (!shared_) key_blocks(request, total);
  return Room::Taken;
}

// Whether there is room for an admission with so many hits that computes `tokens` more.
bool VllmEngine::fits(EngineRequest& request, std::uint32_t tokens, std::size_t hits, std::size_t unreferenced) {
  const std::uint64_t free = store_.available(0);
  // Unreferenced hits sit in the free list and will leave it.
  const std::uint64_t extra = unreferenced + (running_.empty() ? 0 : watermark_blocks_);
  const auto beyond_hits = [hits](std::uint64_t blocks) { return blocks > hits ? blocks - hits : 0; };
  if (config_.scheduler_reserve_full_isl && beyond_hits(blocks_for(request.known)) + extra > free) return false;
  const std::uint32_t total = static_cast<std::uint32_t>(hits * config_.block_size) + tokens;
  const std::uint32_t room = blocks_for(total + burst_room(request, total) + lookahead(total, true));
  // Exact: blocks behind the first that is missing may be here too.
  if (shared_) return cost_of_shared(request, room) + extra - unreferenced <= free;
  return beyond_hits(room) + extra <= free;
}

// An admission that fits: the hits in hits_, and what `tokens` more need; or nothing changed.
VllmEngine::Room VllmEngine::place(RequestSlot id, std::uint32_t tokens, std::size_t hits, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  const std::uint32_t total = static_cast<std::uint32_t>(hits * config_.block_size) + tokens;
  const std::uint64_t blocks = blocks_for(total + burst_room(request, total) + lookahead(total, true));
  if (shared_) return take_shared(id, blocks, now_ns);
  const std::span<const SlotId> found(hits_.data(), hits);
  store_.reference(0, found);
  request.table.reserve(blocks_for(request.known));  // it comes in chunks
  request.table.assign(found.begin(), found.end());
  const auto undo = [&] {
    store_.release(0, request.table, true);
    request.table.clear();
  };
  Room room = Room::Short;
  try {
    room = take_blocks(id, blocks > hits ? blocks - hits : 0, now_ns);
  } catch (...) {
    undo();
    throw;
  }
  if (room != Room::Taken) {
    undo();
    return room;
  }
  request.keyed = static_cast<std::uint32_t>(hits);
  key_blocks(request, total);
  return room;
}

VllmEngine::Room VllmEngine::take_blocks(RequestSlot id, std::size_t count, std::int64_t now_ns) {
  EngineRequest& request = requests_[id];
  if (count == 0) return Room::Taken;
  if (!tiers_ && count > store_.available(0)) return Room::Short;
  const std::size_t held = request.table.size();
  request.table.resize(held + count);
  const std::span<SlotId> fresh = std::span<SlotId>(request.table).subspan(held);
  const std::uint64_t evictions = config_.kv_trace ? store_.metrics(0).evictions : 0;
  if (!tiers_) {
    store_.allocate(0, fresh);
  } else {
    Room room = Room::Short;
    try {
      room = tiers_->take(id, now_ns, fresh);
    } catch (...) {  // a policy of the user's
      request.table.resize(held);
      throw;
    }
    if (room != Room::Taken) {
      request.table.resize(held);
      return room;
    }
  }
  if (config_.kv_trace) trace_taken(count, evictions);
  if (!phantom_.empty()) {
    for (const SlotId slot : fresh) phantom_[slot] = 0;
  }
  return Room::Taken;
}

// A block is visible to others, before it is computed, from the step that schedules its last token on.
void VllmEngine::key_blocks(EngineRequest& request, std::uint32_t total) {
  if (!config_.enable_prefix_caching) return;
  const std::uint32_t full = std::min(total, request.known) / config_.block_size;
  if (full <= request.keyed) return;
  need_identities(request, full);
  store_.commit(0, std::span<SlotId>(request.table).subspan(request.keyed, full - request.keyed),
                std::span<const BlockIdentity>(request.blocks).subspan(request.keyed, full - request.keyed));
  request.keyed = full;
}

void VllmEngine::free_blocks(EngineRequest& request) {
  store_.release(0, request.table, true);
  request.table.clear();
  request.keyed = 0;
}

void VllmEngine::need_identities(EngineRequest& request, std::size_t blocks) {
  if (request.blocks.size() >= blocks) return;
  if (config_.enable_prefix_caching) {
    request.spec.identities->extend(request.blocks, blocks);
    return;
  }
  // Names that nobody else has, the same for the request's life.
  while (request.blocks.size() < blocks) {
    const auto position = static_cast<std::uint32_t>(request.blocks.size());
    request.blocks.push_back(
        {LineageHash::make(xxh3_64_pair(request.id, position, kPrivateSeed), false, 0, position), 0, 0});
  }
}

void VllmEngine::trace_taken(std::size_t taken, std::uint64_t evictions_before) {
  const PoolMetrics m = store_.metrics(0);
  const auto note = [&](bool eviction, std::size_t blocks) {
    if (blocks == 0) return;
    const std::uint64_t active = m.total_blocks - m.reset_blocks - m.inactive_blocks;
    kv_trace_.push_back({begun_ns_, {eviction, blocks, m.reset_blocks, active, m.inactive_blocks}});
  };
  note(false, taken);
  note(true, static_cast<std::size_t>(m.evictions - evictions_before));
}

}  // namespace understudy
