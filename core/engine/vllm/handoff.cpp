// The engine's side of a hand-off: blocks that are kept for a peer, and prompts whose blocks a peer has.
#include <algorithm>
#include <utility>

#include "base/spares.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

// A prompt that another instance computes, or has computed, needs this instance's half of the connector.
void VllmEngine::require_leg(const RequestSpec& spec) const {
  if (spec.leg == KvLeg::Prefill && !sender_) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_decode needs an instance that produces KV; set kv_role to kv_producer or kv_both");
  }
  if (spec.leg == KvLeg::Decode && !receiver_) {
    throw Error(ErrorKind::InvalidArgument, "request ", spec.name,
                ": do_remote_prefill needs an instance that consumes KV; set kv_role to kv_consumer or kv_both");
  }
}

// ── Schedule ──

// Tokens behind the head's own hits that a peer has: the whole rest of the prompt, once.
std::uint32_t VllmEngine::remote_tokens(const Admission& head) {
  const EngineRequest& request = requests_[head.slot];
  const std::uint32_t tokens = receiver_->wants(request.id) ? request.known - head.hit_tokens : 0;
  if (config_.transfer->log) handoff_log_.lookups.back().external = tokens;
  return tokens;
}

void VllmEngine::begin_pull(const EngineRequest& request, std::uint32_t hit_tokens) {
  const std::size_t first = hit_tokens / config_.block_size;
  Pull pull{request.id,
            request.spec.peer,
            request.spec.peer_request,
            {request.table.begin() + static_cast<std::ptrdiff_t>(first), request.table.end()}};
  receiver_->pull(std::move(pull));
}

// The transfer failed, and the prompt is computed here: from this instance's own hits, without another load.
void VllmEngine::give_up_load(EngineRequest& request) {
  kv_->release(request);
  std::erase(prefills_in_flight_, request.slot);
  request.computed = 0;
  request.loaded_tokens = 0;
  request.status = request.before_park;
  request.loaded = request.load_failed = false;
  request.onboard_tried = true;
  --loading_;
}

// Reports the schedule to the worker of this instance.
void VllmEngine::close_handoff(std::size_t admitted_before, std::int64_t now_ns) {
  if (!log_.scheduled.empty()) ++counts_.scheduled;
  for (const Scheduled& turn : log_.scheduled) requests_[turn.slot].last_step = counts_.scheduled;
  has_ended_ = false;
  if (sender_) {
    for (std::size_t i = admitted_before; i < log_.admitted.size(); ++i) {
      if (request(log_.admitted[i]).spec.leg == KvLeg::Prefill) sender_->admitted(log_.admitted[i]);
    }
    SendOrders orders = sender_->close_schedule();
    sender_->begin(orders);
    if (net_ != nullptr) poll_sender(now_ns);
    if (config_.transfer->log) handoff_log_.send = std::move(orders);
  }
  if (!receiver_) return;
  ReceiveOrders orders = receiver_->close_schedule(now_ns);
  if (net_ != nullptr) post_and_poll(orders, now_ns);
  if (config_.transfer->log) handoff_log_.receive = std::move(orders);
}

// ── Worker, with a net ──

// Reads what decode workers have sent until now.
void VllmEngine::poll_sender(std::int64_t now_ns) {
  std::vector<HandOffNet::Heartbeat> heartbeats;
  net_->take_heartbeats(worker_, now_ns, heartbeats);
  for (const HandOffNet::Heartbeat& heartbeat : heartbeats) sender_->extend(heartbeat.requests, heartbeat.time_ns);
  std::vector<RequestId> done;
  net_->take_notes(worker_, now_ns, done);
  for (const RequestId id : done) {
    if (!sender_->confirm(id)) net_->count_late(worker_);
  }
  SendPoll poll = sender_->poll(now_ns);
  fresh_report_.sent = std::move(poll.sent);
  totals_.expired_leases += poll.expired.size();
}

void VllmEngine::post_and_poll(const ReceiveOrders& orders, std::int64_t now_ns) {
  for (const Pull& pull : orders.pulls) {
    if (pull.blocks.empty()) {
      net_->notify(pull.peer, pull.peer_request, now_ns);
    } else {
      net_->read(worker_, pull, now_ns);
    }
  }
  std::map<std::uint32_t, HandOffNet::Heartbeat> heartbeats;
  for (const RequestId id : orders.heartbeat) {
    const KvReceiver::Peer& peer = receiver_->peer_of(id);
    heartbeats[peer.worker].requests.push_back(peer.request);
  }
  for (auto& [peer, heartbeat] : heartbeats) {
    heartbeat.time_ns = now_ns;
    net_->heartbeat(peer, std::move(heartbeat));
  }
  net_->post_waiting(worker_, now_ns);
  net_->hub().run_until(now_ns);  // those that take no time
  net_->take_received(worker_, now_ns, fresh_report_.received, fresh_report_.failed);
  std::ranges::sort(fresh_report_.received);
  std::ranges::sort(fresh_report_.failed);
}

// After a schedule: whether it has nothing to compute, and yet the loop goes on. `reported`: an earlier one's poll had
// something that the update of this one has read.
bool VllmEngine::only_polls(bool reported) const noexcept {
  return net_ != nullptr && log_.scheduled.empty() && log_.preempted.empty() && planned_.empty() &&
         (loading_ > 0 || handoff_pending() || reported || !fresh_report_.empty());
}

// A schedule without tokens: its update follows at once (asynchronously after the next schedule), then the loop sleeps.
void VllmEngine::poll_idle(bool changed, std::int64_t now_ns) {
  changed = changed || !fresh_report_.empty();
  if (config_.async_scheduling) {
    planned_.handoff = std::exchange(fresh_report_, {});
  } else {
    read_report(std::exchange(fresh_report_, {}), now_ns);
  }
  announcer_.release(now_ns);
  if (changed) sample(running_.size(), clock_.now_ns);
  clock_.now_ns = now_ns;
  stuck_.reset();
  if (rests()) return;
  clock_.now_ns = now_ns + kIdlePollNs;
  if (tiers_) landing_wait_.released = tiers_->released();
  polling_ = true;
  poll_due_ = changed;
}

// When the sleeping loop finds something to do, as far as is known.
std::int64_t VllmEngine::next_poll_ns() const {
  if (poll_due_ || (tiers_ && landing_wait_over())) return clock_.now_ns;
  std::int64_t next = net_->next_ns(worker_);
  if (tiers_ && !tiers_->idle()) next = std::min(next, tiers_->hub().next_wake_ns().value_or(kNever));
  if (sender_) next = std::min(next, sender_->next_deadline_ns());
  if (receiver_) next = std::min(next, receiver_->next_heartbeat_ns());
  return next == kNever ? kNever : poll_at(next);
}

// Whether the next schedule may send something to another worker, so that it must not be run ahead of time.
bool VllmEngine::begins_in_order() const {
  if (net_ == nullptr || !receiver_) return false;
  return (!queues_.waiting().empty() && running_.size() < max_running()) || receiver_->has_orders() ||
         receiver_->next_heartbeat_ns() <= clock_.now_ns;
}

// Whether a failed read is about to end its request, at the end of any step.
bool VllmEngine::may_fail_load() const noexcept {
  if (net_ == nullptr || !receiver_ || config_.transfer->recomputes) return false;
  return net_->has_failed(worker_) || !fresh_report_.failed.empty() || !open_.handoff.failed.empty() ||
         !planned_.handoff.failed.empty();
}

// Requests that load change nothing until their blocks have come.
bool VllmEngine::can_fast_forward_pulling() const {
  if (net_ == nullptr || begins_in_order() || !planned_.handoff.empty() || !deferred_frees_.empty()) return false;
  if (net_->next_ns(worker_) <= clock_.now_ns) return false;
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

// The request ends: keep its blocks for a peer, or until its transfer has ended, or free them.
void VllmEngine::leave_handoff(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  has_ended_ = true;
  if (request.spec.leg == KvLeg::Prefill) {
    if (aborted) {
      sender_->aborted(request.id);
    } else {
      if (request.spec.identities) request.spec.identities->offer(request.blocks);
      sender_->hold(request.id, std::move(request.table), now_ns);
      request.table.clear();
      request.keyed = 0;
      return;
    }
  }
  const bool loading = request.status == RequestStatus::Loading;
  if (receiver_ && request.spec.leg == KvLeg::Decode) {
    receiver_->ended(request.id, request.spec.peer, request.spec.peer_request);
  }
  if (loading) --loading_;
  if (loading && !request.loaded) {
    orphans_[request.id] = {request.last_step, std::move(request.table)};
    request.table.clear();
    request.keyed = 0;
  } else {
    release_or_defer(request);
  }
}

void VllmEngine::give_report(HandOffReport report) {
  std::ranges::sort(report.received);
  std::ranges::sort(report.failed);
  (config_.async_scheduling ? planned_ : open_).handoff = std::move(report);
}

// The update reads what the worker's poll found.
void VllmEngine::read_report(const HandOffReport& report, std::int64_t now_ns) {
  for (const RequestId id : report.received) {
    const auto orphan = orphans_.find(id);
    if (orphan != orphans_.end()) {
      if (freeable(orphan->second.step)) {
        kv_->release_table(orphan->second.table);
      } else {
        deferred_frees_.push_back({counts_.scheduled, std::move(orphan->second.table)});
      }
      orphans_.erase(orphan);
      continue;
    }
    const auto found = slots_.find(id);
    if (found == slots_.end()) continue;
    EngineRequest& request = requests_[found->second];
    request.loaded = true;
    request.load_failed = std::ranges::binary_search(report.failed, id);
    receiver_->received(id);
    if (request.load_failed && !config_.transfer->recomputes) fail(found->second, now_ns);
  }
  for (const RequestId id : report.sent) {
    std::vector<SlotId> table = sender_->take(id);
    if (!table.empty()) kv_->release_table(table);
    Spares<SlotId>::keep(std::move(table));
  }
  if (!report.empty()) refusal_.stands = false;
}

// Ends a request whose blocks did not come.
void VllmEngine::fail(RequestSlot slot, std::int64_t now_ns) {
  EngineRequest& request = requests_[slot];
  queues_.remove(slot);
  log_.ended.emplace_back(request.id, request.spec.name);
  if (config_.transfer->log) handoff_log_.failed.push_back(request.id);
  retire(request, false, now_ns);
  effects_.finished.push_back(take_record(slot, FinishReason::Failed, now_ns));
  on_requests_changed();
}

bool VllmEngine::handoff_pending() const noexcept {
  if (sender_ && !sender_->idle()) return true;
  return receiver_ && (receiver_->has_orders() || !orphans_.empty());
}

std::uint64_t VllmEngine::deferred_blocks() const noexcept {
  std::uint64_t blocks = 0;
  for (const KeptBlocks& kept : deferred_frees_) blocks += kept.table.size();
  return blocks;
}

}  // namespace understudy
