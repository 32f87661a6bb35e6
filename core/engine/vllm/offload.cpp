// The engine's side of vLLM's host offload: admissions that look below, loads under way, and deferred frees.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"

namespace understudy {

// ── Admissions ──

// Tokens behind the head's own hits that the host or a peer has; none: ask again in the next step.
std::optional<std::uint32_t> VllmEngine::external_tokens(Admission& head, std::int64_t now_ns) {
  if (offload_ && grouped_ != nullptr) return look_below(head, now_ns);
  return connector_->get_num_new_matched_tokens(requests_[head.slot], head.hit_tokens, now_ns);
}

// A request whose load has ended; possibly an earlier schedule had no room for its other blocks.
Admission VllmEngine::loaded_head(EngineRequest& request, std::int64_t now_ns) {
  Admission head;
  head.slot = request.slot;
  head.hit_tokens = request.computed;
  head.has_loaded = true;
  // A prompt of one token has nothing computed, and is looked up in vain.
  if (parts_.receiver && request.computed == 0) (void)connector_->get_num_new_matched_tokens(request, 0, now_ns);
  return head;
}

void VllmEngine::count_loaded(EngineRequest& request, bool resumed) {
  const std::uint32_t tokens = std::exchange(request.loaded_tokens, 0);
  if (connector_->get_external_cache_hit_source(request.id) == HitSource::Peer) {
    request.record.pulled_tokens += tokens;
    return;
  }
  request.record.below_total[0] += tokens;
  if (!resumed) request.record.below_first[0] += tokens;
}

// Tokens to load behind the hit, with several cache groups. The host is asked for what follows whole blocks; a hit that
// ends inside a block is dropped for a longer load. With a window that is computed again, a short hit is worth nothing.
std::optional<std::uint32_t> VllmEngine::look_below(Admission& head, std::int64_t now_ns) {
  const std::uint32_t unit = grouped_->layout().scheduler_block;
  const std::uint32_t replay = grouped_->replay();
  const std::uint32_t inside = head.hit.tokens % unit;
  const std::uint32_t local = head.hit.tokens - inside;
  const std::optional<std::uint32_t> found =
      connector_->get_num_new_matched_tokens(requests_[head.slot], local, now_ns);
  if (!found) return found;
  std::uint32_t below = *found;
  if (replay > 0 && below % unit > 0) {
    below -= below % unit;
    // vLLM 0.33 does not look again, and stops with an assertion if a window or a state does not end there.
    if (!connector_->can_load(requests_[head.slot], local, below)) below = 0;
  }
  if (below > inside && inside > 0) {
    grouped_->truncate(head.hit, local);
  } else if (inside > 0) {
    below = 0;
  }
  if (replay > 0 && head.hit.tokens + below <= replay) {
    grouped_->truncate(head.hit, 0);
    below = 0;
  }
  head.hit_tokens = head.hit.tokens - std::min(head.hit.tokens, replay);
  return below;
}

// Allocate blocks for a load, on top of all that requests in progress still need: a load holds its blocks, computes
// nothing, and cannot be preempted.
bool VllmEngine::place_load(const Admission& head, std::uint32_t tokens, std::int64_t now_ns) {
  EngineRequest& request = requests_[head.slot];
  const std::uint64_t free = kv_->available();
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (grouped_ != nullptr) {
    const std::uint32_t total = head.hit.tokens + tokens;
    const bool reserves = config_.scheduler_reserve_full_isl;
    if (reserves && grouped_->load_cost(request, total, request.known, true) + watermark > free) return false;
    if (grouped_->load_cost(request, total, total, false) + watermark + lacking() > free) return false;
    grouped_->place_load(request, total);
    grouped_->count_lookup(request.known, head.hit.tokens, request.status == RequestStatus::Preempted);
    begin_load(request, head.hit.tokens, tokens, now_ns);
    return true;
  }
  const std::uint64_t extra = head.hit.unreferenced + watermark;
  if (config_.scheduler_reserve_full_isl && kv_->beyond(head.hit, request.known) + extra > free) return false;
  const std::uint32_t room = head.hit_tokens + tokens;
  if (kv_->beyond(head.hit, room) + extra + lacking() > free) return false;
  if (kv_->place(request, head.hit, room, head.hit_tokens, now_ns) != Room::Taken) return false;
  begin_load(request, head.hit_tokens, tokens, now_ns);
  return true;
}

// Start to load `tokens` tokens behind `local` ones, for which the request has blocks.
void VllmEngine::begin_load(EngineRequest& request, std::uint32_t local, std::uint32_t tokens, std::int64_t now_ns) {
  connector_->update_state_after_alloc(request, local, tokens, now_ns);
  request.computed = local + tokens;
  request.before_park = request.status;
  request.status = RequestStatus::Loading;
  request.loaded = false;
  request.loaded_tokens = tokens;
  request.load_begun_ns = now_ns;
  if (!std::ranges::count(prefills_in_flight_, request.slot)) prefills_in_flight_.push_back(request.slot);
  ++loading_;
}

// Blocks that prompts in progress, those being loaded among them, need to their end.
std::uint64_t VllmEngine::lacking() const {
  std::uint64_t blocks = 0;
  for (const RequestSlot slot : prefills_in_flight_) {
    const EngineRequest& request = requests_[slot];
    blocks += grouped_ != nullptr ? grouped_->lacks_whole(request)
                                  : kv_->lacks(request, std::min(request.known, config_.max_model_len));
  }
  return blocks;
}

// The load has ended: make the blocks matchable and the request admissible.
void VllmEngine::promote(EngineRequest& request, std::int64_t now_ns) {
  kv_->name(request, request.computed);
  const std::uint32_t replay = grouped_ != nullptr ? grouped_->replay() : 0;
  if (replay > 0) {
    request.computed -= std::min(request.computed, replay);
    request.loaded_tokens -= std::min(request.loaded_tokens, replay);
  } else if (request.computed == request.known) {  // something to sample from
    --request.computed;
    --request.loaded_tokens;
  }
  if (grouped_ != nullptr) grouped_->loaded(request, request.computed);
  request.status = request.before_park;
  request.loaded = false;
  if (!parts_.receiver) request.record.parked_ns += now_ns - request.load_begun_ns;
  --loading_;
}

// The same as `fits`, for a request that holds blocks.
bool VllmEngine::fits_behind(const Admission& head) const {
  const EngineRequest& request = requests_[head.slot];
  const std::uint64_t watermark = running_.empty() ? 0 : watermark_blocks_;
  if (grouped_ != nullptr) {
    return grouped_->fits_behind(request, room_up_to(request, head.total(), true), watermark,
                                 config_.scheduler_reserve_full_isl);
  }
  const auto fit = [&](std::uint32_t tokens) { return kv_->lacks(request, tokens) + watermark <= kv_->available(); };
  if (config_.scheduler_reserve_full_isl && !fit(request.known)) return false;
  return fit(room_up_to(request, head.total(), true));
}

FetchStages VllmEngine::fetch_stages() const {
  FetchStages stages;
  stages.under_way = parked_;
  queues_.for_each([&](RequestSlot slot) {
    const EngineRequest& request = requests_[slot];
    if (request.status == RequestStatus::Loading) {
      ++(request.loaded ? stages.done : stages.under_way);
    } else if (kv_->holds(request)) {
      ++stages.done;
    } else if (request.wants_load) {
      ++stages.to_start;
    }
  });
  return stages;
}

// ── Steps ──

// Report the scheduled requests to the connector, and collect its orders to the worker.
void VllmEngine::close_connector(std::size_t admitted_before, std::int64_t now_ns) {
  const std::size_t admitted = log_.admitted.size() - admitted_before;
  const std::size_t first_admitted = log_.scheduled.size() - admitted;
  if (!log_.scheduled.empty()) ++counts_.scheduled;
  for (std::size_t i = 0; i < log_.scheduled.size(); ++i) {
    EngineRequest& request = requests_[log_.scheduled[i].slot];
    const bool fresh = i >= first_admitted;
    connector_->on_scheduled({request, fresh, fresh && log_.resumed[admitted_before + i - first_admitted]});
    request.last_step = counts_.scheduled;
  }
  has_ended_ = false;
  meta_ = connector_->build_connector_meta(now_ns);
  polled_ = {};
  connector_->poll(polled_, now_ns);
  totals_.expired_leases += polled_.expired;
}

// Release the blocks of the schedule's copies, or defer it until a step has run them.
void VllmEngine::end_group_schedule() {
  const std::uint64_t step = counts_.scheduled + (log_.scheduled.empty() ? 1 : 0);
  if (!offload_ || freeable(step)) return grouped_->end_schedule();
  std::vector<SlotId> blocks = grouped_->end_schedule_later();
  std::ranges::reverse(blocks);
  if (!blocks.empty()) left_.deferred.push_back({step, {std::move(blocks), {}}});
}

// The request ends: keep its blocks until they are sent, or until its load has ended, or free them.
void VllmEngine::leave(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  has_ended_ = true;
  const bool loading = request.status == RequestStatus::Loading;
  if (loading) --loading_;
  if (connector_->request_finished(request, aborted, now_ns)) {
    if (request.spec.identities && !request.blocks.empty()) request.spec.identities->offer(request.blocks);
    left_.kept.keep(request.id, kv_->detach(request));
    return;
  }
  // vLLM hands over the blocks that the window still reads.
  if (grouped_ != nullptr && offload_) {
    grouped_->leave_behind(request,
                           grouped_->processed(request, request.computed, request.last_step, counts_.processed));
  }
  if (loading && !request.loaded) {
    left_.orphans[request.id] = {request.last_step, kv_->detach(request)};
  } else {
    release_or_defer(request);
  }
}

// Free the request's blocks, or defer it while a step in flight may still write to them.
void VllmEngine::release_or_defer(EngineRequest& request) {
  if (freeable(request.last_step)) return kv_->release(request);
  if (kv_->holds(request)) left_.deferred.push_back({counts_.scheduled, kv_->detach(request)});
  request.keyed = 0;
}

// Free deferred blocks after a step's output has arrived; `computed`: the step computed tokens.
void VllmEngine::free_deferred(bool computed) {
  if (!computed) return;
  ++counts_.processed;
  for (; !left_.deferred.empty() && left_.deferred.front().step <= counts_.processed; left_.deferred.pop_front()) {
    kv_->release_table(std::move(left_.deferred.front().table));
  }
}

// ── Transfers ──

// Begin the transfers of a planned batch that computes no token.
std::int64_t VllmEngine::begin_transfers_alone(std::int64_t now_ns) {
  if (!offload_links_ || !planned_.empty() || planned_.meta == nullptr) return now_ns;
  return connector_->start_step(std::move(planned_.meta), planned_.output, now_ns);
}

// Whether a step without computed tokens makes progress on transfers.
bool VllmEngine::still_offloads() const {
  if ((config_.transfer || polls_) && (loading_ > 0 || handoff_pending())) return true;
  if (!offload_) return false;
  return offload_links_ ? meta_ != nullptr || planned_.meta != nullptr || !offload_links_->idle()
                        : offload_->has_jobs();
}

// The worker has done these copies.
void VllmEngine::report_offload(std::vector<JobId> done, std::int64_t now_ns) {
  if (done.empty()) return;
  ConnectorOutput output;
  parts_.offloading->report(std::move(done), output);
  update_from_connector(output, now_ns);
}

// A step has ended. Without requests to schedule, vLLM runs empty steps until all stores are done.
void VllmEngine::offload_after_step(std::int64_t now_ns) {
  if (offload_links_->has_done()) report_offload(offload_links_->take_done(), now_ns);
  const bool rests = quiescent() && !polls_;  // else it polls
  if (rests) (void)begin_transfers_alone(now_ns);
  while (rests && (offload_->has_ended_to_tell() || !offload_links_->submitted())) {
    (void)connector_->start_step(connector_->build_connector_meta(now_ns), planned_.output, now_ns);
  }
}

// Count device blocks that the offload references, apart from the tables of running requests.
std::uint64_t VllmEngine::check_offload() const {
  std::uint64_t references = 0;
  queues_.for_each([&](RequestSlot slot) { references += kv_->num_blocks(requests_[slot]); });
  return references + left_.references();
}

}  // namespace understudy
