// Loads of a waiting request's blocks: from a connector, into blocks of its own, and from tiers.
#include <algorithm>
#include <utility>

#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

// ── From a connector ──

Scheduler::Load Scheduler::load_from_connector(Admission& head, std::int64_t now_ns) {
  if (head.has_loaded) return Load::None;
  EngineRequest& request = requests_[head.slot];
  const std::optional<std::uint32_t> external = get_num_new_matched_tokens(head, now_ns);
  request.wants_load = external.value_or(0) > 0;
  if (request.wants_load && !place_load(head, *external, now_ns)) {
    refusal_.no_room = true;
    return Load::NoRoom;
  }
  return external != 0u ? Load::Begun : Load::None;
}

// Tokens behind the head's own hits that the host or a peer has; none: ask again in the next step.
std::optional<std::uint32_t> Scheduler::get_num_new_matched_tokens(Admission& head, std::int64_t now_ns) {
  if (config_.offload && grouped_ != nullptr) return match_groups(head, now_ns);
  return connector_.get_num_new_matched_tokens(requests_[head.slot], head.hit_tokens, now_ns);
}

// Tokens to load behind the hit, with several cache groups. The host is asked for what follows whole blocks; a hit that
// ends inside a block is dropped for a longer load. With a window that is computed again, a short hit is worth nothing.
std::optional<std::uint32_t> Scheduler::match_groups(Admission& head, std::int64_t now_ns) {
  const std::uint32_t unit = grouped_->layout().scheduler_block;
  const std::uint32_t replay = grouped_->replay();
  const std::uint32_t inside = head.hit.tokens % unit;
  const std::uint32_t local = head.hit.tokens - inside;
  const std::optional<std::uint32_t> found = connector_.get_num_new_matched_tokens(requests_[head.slot], local, now_ns);
  if (!found) return found;
  std::uint32_t below = *found;
  if (replay > 0 && below % unit > 0) {
    below -= below % unit;
    // vLLM 0.33 does not look again, and stops with an assertion if a window or a state does not end there.
    if (!connector_.can_load(requests_[head.slot], local, below)) below = 0;
  }
  if (below > inside && inside > 0) {
    grouped_->blocks()->truncate(head.hit, local);
  } else if (inside > 0) {
    below = 0;
  }
  if (replay > 0 && head.hit.tokens + below <= replay) {
    grouped_->blocks()->truncate(head.hit, 0);
    below = 0;
  }
  head.hit_tokens = head.hit.tokens - std::min(head.hit.tokens, replay);
  return below;
}

// A request whose load has ended; possibly an earlier schedule had no room for its other blocks.
Admission Scheduler::loaded_head(EngineRequest& request, std::int64_t now_ns) {
  Admission head;
  head.slot = request.slot;
  head.hit_tokens = request.num_computed_tokens;
  head.has_loaded = true;
  // A prompt of one token has nothing computed, and is looked up in vain.
  if (connector_.consumes() && head.hit_tokens == 0) (void)connector_.get_num_new_matched_tokens(request, 0, now_ns);
  return head;
}

// Allocate blocks for a load, on top of all that requests in progress still need: a load holds its blocks, computes
// nothing, and cannot be preempted.
bool Scheduler::place_load(const Admission& head, std::uint32_t tokens, std::int64_t now_ns) {
  EngineRequest& request = requests_[head.slot];
  const std::uint64_t free = kv_.available();
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (grouped_ != nullptr) {
    const std::uint32_t total = head.hit.tokens + tokens;
    const bool reserves = config_.scheduler_reserve_full_isl;
    if (reserves && grouped_->blocks()->load_cost(request, total, request.known, true) + watermark > free) return false;
    if (grouped_->blocks()->load_cost(request, total, total, false) + watermark + lacking() > free) return false;
    grouped_->blocks()->place_load(request, total);
    grouped_->count_lookup(request.known, head.hit.tokens, request.status == RequestStatus::Preempted);
    begin_load(request, head.hit.tokens, tokens, now_ns);
    return true;
  }
  const std::uint64_t extra = head.hit.unreferenced + watermark;
  if (config_.scheduler_reserve_full_isl && kv_.beyond(head.hit, request.known) + extra > free) return false;
  const std::uint32_t room = head.hit_tokens + tokens;
  if (kv_.beyond(head.hit, room) + extra + lacking() > free) return false;
  if (kv_.place(request, head.hit, room, head.hit_tokens, now_ns) != Room::Taken) return false;
  begin_load(request, head.hit_tokens, tokens, now_ns);
  return true;
}

// Start to load `tokens` tokens behind `local` ones, for which the request has blocks.
void Scheduler::begin_load(EngineRequest& request, std::uint32_t local, std::uint32_t tokens, std::int64_t now_ns) {
  connector_.update_state_after_alloc(request, local, tokens, now_ns);
  request.num_computed_tokens = local + tokens;
  request.before_park = request.status;
  request.status = RequestStatus::Loading;
  request.loaded = false;
  request.loaded_tokens = tokens;
  request.load_begun_ns = now_ns;
  if (!std::ranges::count(prefills_in_flight_, request.slot)) prefills_in_flight_.push_back(request.slot);
  ++counts_.loading;
}

// Blocks that prompts in progress, those being loaded among them, need to their end.
std::uint64_t Scheduler::lacking() const {
  std::uint64_t blocks = 0;
  for (const RequestSlot slot : prefills_in_flight_) {
    const EngineRequest& request = requests_[slot];
    blocks += grouped_ != nullptr ? grouped_->blocks()->lacks_whole(request)
                                  : kv_.lacks(request, std::min(request.known, config_.max_model_len));
  }
  return blocks;
}

// The load has ended: make the blocks matchable and the request admissible.
void Scheduler::update_waiting_for_remote_kv(EngineRequest& request, std::int64_t now_ns) {
  kv_.name(request, request.num_computed_tokens);
  const std::uint32_t replay = kv_.replay();
  if (replay > 0) {
    request.num_computed_tokens -= std::min(request.num_computed_tokens, replay);
    request.loaded_tokens -= std::min(request.loaded_tokens, replay);
  } else if (request.num_computed_tokens == request.known) {  // something to sample from
    --request.num_computed_tokens;
    --request.loaded_tokens;
  }
  if (grouped_ != nullptr) grouped_->blocks()->loaded(request, request.num_computed_tokens);
  request.status = request.before_park;
  request.loaded = false;
  if (!connector_.consumes()) request.record.parked_ns += now_ns - request.load_begun_ns;
  --counts_.loading;
}

// The transfer failed, and the prompt is computed here: from this instance's own hits, and from another connector's. To
// the room that loads leave for prompts it stays one in progress, as in vLLM, though it holds no block.
void Scheduler::give_up_load(EngineRequest& request) {
  kv_.release(request);
  request.num_computed_tokens = 0;
  request.loaded_tokens = 0;
  request.status = request.before_park;
  request.loaded = request.load_failed = false;
  request.onboard_tried = true;
  --counts_.loading;
}

// ── From tiers ──

// A prompt that no other worker has computed may be loaded from below.
Scheduler::Load Scheduler::load_from_tiers(Admission& head, std::int64_t now_ns) {
  if (!onboarding_.on() || head.has_loaded) return Load::None;
  const WorkerTiers::Onboard outcome = onboarding_.load(requests_[head.slot], head, kv_.found(head.hit), now_ns);
  if (outcome == WorkerTiers::Onboard::Parked) return Load::Begun;
  refusal_.stands = outcome == WorkerTiers::Onboard::Retry;
  head.slow_load = outcome == WorkerTiers::Onboard::Slow;
  return refusal_.stands ? Load::NoRoom : Load::None;
}

// The request waits outside the queues while its blocks are loaded.
void Scheduler::park(EngineRequest& request) {
  request.before_park = request.status;
  request.status = RequestStatus::Parked;
  request.onboard_tried = true;
  ++counts_.parked;
  resume_loaded();  // loads that took no time
}

void Scheduler::resume_loaded() {
  for (const RequestSlot slot : tiers_->take_ready()) {
    EngineRequest& request = requests_[slot];
    request.status = request.before_park;
    waiting_.resume(slot);
    --counts_.parked;
    refusal_.stands = false;
  }
}

// ── Counts ──

// Where an admission's hits have been.
void Scheduler::count_hits(const Admission& head, bool resumed) {
  EngineRequest& request = requests_[head.slot];
  totals_.phantom_hit_blocks += kv_.phantoms(head.hit);
  if (grouped_ != nullptr) {
    // The lookup of a request that loaded blocks was counted when the load began.
    if (!head.has_loaded) grouped_->count_lookup(request.known, head.hit.tokens, resumed);
    const std::uint32_t loaded = head.hit_tokens > 0 ? head.hit_tokens + grouped_->replay() : 0;
    grouped_->count_admission(request, head.has_loaded ? loaded : head.hit.tokens);
  }
  if (tiers_ != nullptr) count_origins(head, resumed);
  if (request.loaded_tokens > 0) count_loaded(request, resumed);
}

void Scheduler::count_loaded(EngineRequest& request, bool resumed) {
  const std::uint32_t tokens = std::exchange(request.loaded_tokens, 0);
  if (connector_.get_external_cache_hit_source(request.id) == HitSource::Peer) {
    request.record.pulled_tokens += tokens;
    return;
  }
  request.record.below_total[0] += tokens;
  if (!resumed) request.record.below_first[0] += tokens;
}

// Hits that came from lower tiers and were on the device only for this request.
void Scheduler::count_origins(const Admission& head, bool resumed) {
  EngineRequest& request = requests_[head.slot];
  if (head.slow_load) tiers_->note_slow();
  tiers_->note_hits(kv_.found(head.hit));
  request.onboard_tried = false;
  request.through = 0;
  const std::optional<WorkerTiers::Origin> origin = tiers_->take_origin(head.slot);
  if (!origin) return;
  request.record.parked_ns += origin->parked_ns;
  if (origin->failed) return;  // another request computed the blocks meanwhile
  for (std::size_t i = 0; i < origin->tiers.size(); ++i) {
    const auto start = static_cast<std::uint32_t>((origin->first_block + i) * config_.block_size);
    if (start >= head.hit_tokens) break;
    if (origin->tiers[i] == Tier::G1) continue;
    // A hit may end inside a unit if its last tokens are computed again.
    const std::uint32_t tokens = std::min(config_.block_size, head.hit_tokens - start);
    const auto below = static_cast<std::size_t>(origin->tiers[i]) - static_cast<std::size_t>(Tier::G2);
    request.record.below_total[below] += tokens;
    if (!resumed) request.record.below_first[below] += tokens;
  }
}

}  // namespace understudy
