// The engine's side of a hand-off: blocks that are kept for a peer, and prompts whose blocks a peer has.
#include <algorithm>
#include <utility>

#include "engine/vllm/engine.hpp"

namespace understudy {

namespace {

// Without tokens to compute vLLM's loop sleeps this long between two schedules.
constexpr std::int64_t kIdlePollNs = 1'000'000;

}  // namespace

// A prompt that another instance computes, or has computed, needs this instance's half of the connector.
void VllmEngine::require_leg(const RequestSpec& spec) const {
  if (spec.leg == KvLeg::Prefill && !connector_->produces()) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_decode needs an instance that produces KV; set kv_role to kv_producer or kv_both");
  }
  if (spec.leg == KvLeg::Decode && !connector_->consumes()) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_prefill needs an instance that consumes KV; set kv_role to kv_consumer or kv_both");
  }
}

// ── Schedule ──

// The transfer failed, and the prompt is computed here: from this instance's own hits, and from another connector's. To
// the room that loads leave for prompts it stays one in progress, as in vLLM, though it holds no block.
void VllmEngine::give_up_load(EngineRequest& request) {
  kv_->release(request);
  request.computed = 0;
  request.loaded_tokens = 0;
  request.status = request.before_park;
  request.loaded = request.load_failed = false;
  request.onboard_tried = true;
  --loading_;
}

// After a schedule: whether it has nothing to compute, and yet the loop goes on. `reported`: an earlier one's poll had
// something that the update of this one has read.
bool VllmEngine::only_polls(bool reported) const noexcept {
  return polls_ && log_.scheduled.empty() && log_.preempted.empty() && planned_.empty() &&
         (loading_ > 0 || handoff_pending() || reported || !polled_.empty());
}

// A schedule without tokens: its update follows at once (asynchronously after the next schedule), then the loop sleeps.
void VllmEngine::poll_idle(bool changed, std::int64_t now_ns) {
  changed = changed || !polled_.empty();
  (void)connector_->start_step(std::move(meta_), polled_, now_ns);  // no batch waits for it
  if (config_.async_scheduling) {
    planned_.output = std::exchange(polled_, {});
  } else {
    update_from_connector(std::exchange(polled_, {}), now_ns);
  }
  announcer_.release(now_ns);
  if (changed) sample(running_.size(), clock_.now_ns);
  clock_.now_ns = now_ns;
  // The head of the queue lacks room, and nothing is left that could free a block: heartbeats go on for ever. So do
  // vLLM's, if a request whose read failed counts as a prompt in progress against its own load.
  const bool moves = changed || !refusal_.no_room || !running_.empty() || parked_ > 0 || left_.references() > 0 ||
                     (tiers_ && !tiers_->idle()) || (offload_ && offload_->has_jobs()) ||
                     queues_.any_of([this](RequestSlot slot) {
                       return requests_[slot].status == RequestStatus::Loading && !requests_[slot].loaded;
                     });
  if (moves) {
    stuck_.reset();
  } else if (!stuck_) {
    stuck_ = kv_->available();
  }
  if (rests()) return;
  clock_.now_ns = now_ns + kIdlePollNs;
  if (tiers_) landing_wait_.released = tiers_->released();
  polling_ = true;
  poll_due_ = changed;
}

std::int64_t VllmEngine::poll_at(std::int64_t time_ns) const noexcept {
  const std::int64_t late_ns = std::max<std::int64_t>(time_ns - clock_.now_ns, 0);
  return clock_.now_ns + (late_ns + kIdlePollNs - 1) / kIdlePollNs * kIdlePollNs;
}

// When the sleeping loop finds something to do, as far as is known.
std::int64_t VllmEngine::next_poll_ns() const {
  if (poll_due_ || (tiers_ && landing_wait_over())) return clock_.now_ns;
  if (offload_links_ && !offload_links_->submitted()) return clock_.now_ns;  // the next step submits
  std::int64_t next = connector_->next_event_ns();
  const bool copies = tiers_ && (!tiers_->idle() || (offload_links_ && !offload_links_->idle()));
  if (copies) next = std::min(next, tiers_->hub().next_wake_ns().value_or(kNever));
  return next == kNever ? kNever : poll_at(next);
}

// Whether the next schedule may send something to another worker, so that it must not be run ahead of time.
bool VllmEngine::begins_in_order() const {
  if (!polls_ || !loads_) return false;
  return (!queues_.waiting().empty() && running_.size() < max_running()) || connector_->sends_at(clock_.now_ns);
}

// Whether a failed read is about to end its request, at the end of any step.
bool VllmEngine::may_fail_load() const noexcept {
  if (!polls_ || !loads_ || recomputes_) return false;
  return connector_->has_failed() || !polled_.failed.empty() || !open_.output.failed.empty() ||
         !planned_.output.failed.empty();
}

// Requests that load change nothing until their blocks have come.
bool VllmEngine::are_loads_quiet() const {
  if (!polls_ || begins_in_order() || !planned_.output.empty() || !left_.deferred.empty()) return false;
  if (connector_->next_event_ns() <= clock_.now_ns) return false;
  return std::ranges::all_of(queues_.skipped().ids(), [this](RequestSlot slot) {
    return requests_[slot].status == RequestStatus::Loading && !requests_[slot].loaded;
  });
}

// An output in flight of a request that is preempted: a producer computes and samples it again.
void VllmEngine::drop_in_flight(const EngineRequest& victim) {
  for (Scheduled& turn : planned_.turns) {
    if (turn.id == victim.id) turn.samples = false;
  }
}

// ── Update ──

// The update reads what the worker has reported.
void VllmEngine::update_from_connector(const ConnectorOutput& output, std::int64_t now_ns) {
  if (output.empty()) return;
  connector_->update_connector_output(output);
  for (const RequestId id : output.received) {
    const auto orphan = left_.orphans.find(id);
    if (orphan != left_.orphans.end()) {
      if (freeable(orphan->second.step)) {
        kv_->release_table(std::move(orphan->second.table));
      } else {
        left_.deferred.push_back({counts_.scheduled, std::move(orphan->second.table)});
      }
      left_.orphans.erase(orphan);
      continue;
    }
    const auto found = slots_.find(id);
    if (found == slots_.end()) continue;
    EngineRequest& request = requests_[found->second];
    request.loaded = true;
    request.load_failed = std::ranges::binary_search(output.failed, id);
    if (request.load_failed && !recomputes_) fail(found->second, now_ns);
  }
  for (const RequestId id : output.sent) {
    KvTable table = left_.kept.take(id);
    if (!table.empty()) kv_->release_table(std::move(table));
  }
  if (!output.sent.empty() || !output.received.empty()) refusal_.stands = false;
}

// Ends a request whose blocks did not come.
void VllmEngine::fail(RequestSlot slot, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  queues_.remove(slot);
  log_.ended.emplace_back(request.id, request.spec.name);
  retire(request, false, now_ns);
  effects_.finished.push_back(take_record(slot, FinishReason::Failed, now_ns));
  on_requests_changed();
}

bool VllmEngine::handoff_pending() const noexcept {
  return !left_.kept.empty() || connector_->has_pending_work() || (loads_ && !left_.orphans.empty());
}

}  // namespace understudy
