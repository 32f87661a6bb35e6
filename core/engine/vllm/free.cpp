// The end of a request: its blocks, and its record.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "base/spares.hpp"
#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

// The request has ended, or is about to leave the running list.
void Scheduler::free_request(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  std::erase(prefills_in_flight_, request.slot);
  leave_blocks(request, aborted, now_ns);
  request.status = RequestStatus::Finished;
  Spares<SlotId>::keep(std::move(request.table));  // assigning {} would keep the memory here
  Spares<BlockIdentity>::keep(std::move(request.blocks));
  Spares<BlockName>::keep(std::move(request.names));
  Spares<SlotId>::keep(std::move(request.runs.loose));
  Spares<HeldRun>::keep(std::move(request.runs.runs));
  request.spec.identities = nullptr;
}

// Keep its blocks until they are sent, or until its load has ended, or free them.
void Scheduler::leave_blocks(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  counts_.has_ended = true;
  const bool loading = request.status == RequestStatus::Loading;
  if (loading) --counts_.loading;
  if (connector_.request_finished(request, aborted, now_ns)) {
    if (request.spec.identities && !request.blocks.empty()) request.spec.identities->offer(request.blocks);
    left_.kept.keep(request.id, kv_.detach(request));
    return;
  }
  // vLLM hands over the blocks that the window still reads.
  if (grouped_ != nullptr && config_.offload) {
    grouped_->blocks()->leave_behind(request, grouped_->blocks()->processed(request, request.num_computed_tokens,
                                                                            request.last_step, steps_.processed));
  }
  if (loading && !request.loaded) {
    left_.orphans[request.id] = {request.last_step, kv_.detach(request)};
  } else {
    free_blocks(request);
  }
}

// Free the request's blocks, or defer it while a step in flight may still write to them.
void Scheduler::free_blocks(EngineRequest& request) {
  if (freeable(request.last_step)) return kv_.release(request);
  if (kv_.holds(request)) left_.deferred.push_back({steps_.scheduled, kv_.detach(request)});
  request.keyed = 0;
}

// Free deferred blocks after the output of a step that computed tokens.
void Scheduler::free_deferred() {
  ++steps_.processed;
  for (; !left_.deferred.empty() && left_.deferred.front().step <= steps_.processed; left_.deferred.pop_front()) {
    kv_.release_table(std::move(left_.deferred.front().table));
  }
}

// ── Records ──

void Scheduler::finish(RequestSlot slot, std::int64_t end_ns) {
  EngineRequest& request = requests_[slot];
  free_request(request, false, end_ns);
  token_log_.count_gaps(request.tokens, request.outputs());
  const bool stopped = request.spec.eos_at > 0 && request.outputs() == request.spec.eos_at;
  effects_.finished.push_back(take_record(slot, stopped ? FinishReason::Stop : FinishReason::Length, end_ns));
  request.tokens.give_back();
}

// Free the slot of a finished request and return its record.
RequestRecord Scheduler::take_record(RequestSlot slot, FinishReason reason, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  UNDERSTUDY_ASSERT(!kv_.holds(request), "an ended request holds no blocks");
  slots_.erase(request.id);
  free_slots_.push_back(slot);
  UNDERSTUDY_ASSERT(slots_.size() + free_slots_.size() == requests_.size(), "every slot is in use or free");
  RequestRecord record = std::move(request.record);
  record.id = request.id;
  record.name = std::move(request.spec.name);
  record.output_tokens = request.outputs();
  record.reason = reason;
  record.finish_ns = now_ns;
  if (tiers_ != nullptr) record.room_wait_ns = tiers_->take_waited_ns(slot);
  const TokenRuns& runs = request.tokens;
  if (runs.empty()) return record;
  record.first_token_ns = token_log_.end_of(runs.front().first_step);
  record.last_token_ns = token_log_.end_of(runs.back().first_step + runs.back().count - 1);
  if (request.first_burst > 1) {
    record.second_token_ns = record.first_token_ns;
  } else if (runs.front().count > 1) {
    record.second_token_ns = token_log_.end_of(runs.front().first_step + 1);
  } else if (runs.size() > 1) {
    record.second_token_ns = token_log_.end_of(runs[1].first_step);
  }
  return record;
}

}  // namespace understudy
