#include "engine/vllm/connector/nixl_connector.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace understudy {

NixlConnector::NixlConnector(const VllmTransfer& settings, std::uint32_t block_size, HandOffNet* net,
                             std::uint32_t worker)
    : settings_(settings), block_size_(block_size), net_(net), worker_(worker) {
  if (settings.produces) sender_.emplace(settings);
  if (settings.consumes) receiver_.emplace(settings);
}

// ── Scheduler ──

void NixlConnector::on_new_request(const EngineRequest& request) {
  const RequestSpec& spec = request.spec;
  if (spec.leg == KvLeg::Decode) receiver_->came(request.id, spec.peer, spec.peer_request);
}

// The whole rest of the prompt, once.
std::optional<std::uint32_t> NixlConnector::get_num_new_matched_tokens(EngineRequest& request, std::uint32_t local,
                                                                       std::int64_t /*now_ns*/) {
  const std::uint32_t tokens = receiver_ && receiver_->wants(request.id) ? request.known - local : 0;
  if (settings_.log) log_.lookups.push_back({request.id, local, tokens});
  return tokens;
}

void NixlConnector::update_state_after_alloc(EngineRequest& request, std::uint32_t local, std::uint32_t external,
                                             std::int64_t /*now_ns*/) {
  if (request.spec.leg == KvLeg::Prefill) sender_->admitted(request.id);
  if (!receiver_ || !receiver_->wants(request.id)) return;
  Pull pull{request.id, request.spec.peer, request.spec.peer_request, {}};
  if (external > 0) {
    const std::span<const SlotId> mine = request.ids(ids_).subspan(local / block_size_);
    pull.blocks.assign(mine.begin(), mine.end());
    receiver_->pull(std::move(pull));
  } else {
    receiver_->give_up(std::move(pull));
  }
}

std::unique_ptr<ConnectorMetadata> NixlConnector::build_connector_meta(std::int64_t now_ns) {
  if (sender_) {
    SendOrders orders = sender_->close_schedule();
    sender_->begin(orders);
    if (settings_.log) log_.send = std::move(orders);
  }
  if (receiver_) {
    ReceiveOrders orders = receiver_->close_schedule(now_ns);
    if (net_ != nullptr) post(orders, now_ns);
    if (settings_.log) log_.receive = std::move(orders);
  }
  return nullptr;  // its worker has begun: a transfer does not wait for the batch
}

bool NixlConnector::request_finished(EngineRequest& request, bool aborted, std::int64_t now_ns) {
  const RequestSpec& spec = request.spec;
  if (receiver_ && spec.leg == KvLeg::Decode) receiver_->ended(request.id, spec.peer, spec.peer_request);
  if (spec.leg != KvLeg::Prefill) return false;
  if (aborted) {
    sender_->aborted(request.id);
  } else {
    sender_->finished(request.id, now_ns);
  }
  return !aborted;
}

void NixlConnector::update_connector_output(const ConnectorOutput& output) {
  if (!receiver_) return;
  for (const RequestId id : output.received) receiver_->received(id);
}

bool NixlConnector::has_pending_work() const {
  return (sender_ && sender_->has_orders()) || (receiver_ && receiver_->has_orders());
}

// ── Time ──

std::int64_t NixlConnector::next_event_ns() const {
  if (net_ == nullptr) return kNever;
  std::int64_t next = net_->next_ns(worker_);
  if (sender_) next = std::min(next, sender_->next_deadline_ns());
  if (receiver_) next = std::min(next, receiver_->next_heartbeat_ns());
  return next;
}

bool NixlConnector::sends_at(std::int64_t now_ns) const {
  return receiver_ && (receiver_->has_orders() || receiver_->next_heartbeat_ns() <= now_ns);
}

// ── Worker, with a net ──

void NixlConnector::post(const ReceiveOrders& orders, std::int64_t now_ns) {
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
}

void NixlConnector::poll(ConnectorOutput& output, std::int64_t now_ns) {
  if (net_ == nullptr) return;
  if (sender_) poll_sender(output, now_ns);
  if (!receiver_) return;
  net_->post_waiting(worker_, now_ns);
  net_->hub().run_until(now_ns);  // those that take no time
  net_->take_received(worker_, now_ns, output.received, output.failed);
  std::ranges::sort(output.received);
  std::ranges::sort(output.failed);
}

// Reads what decode workers have sent until now.
void NixlConnector::poll_sender(ConnectorOutput& output, std::int64_t now_ns) {
  std::vector<HandOffNet::Heartbeat> heartbeats;
  net_->take_heartbeats(worker_, now_ns, heartbeats);
  for (const HandOffNet::Heartbeat& heartbeat : heartbeats) sender_->extend(heartbeat.requests, heartbeat.time_ns);
  std::vector<RequestId> done;
  net_->take_notes(worker_, now_ns, done);
  for (const RequestId id : done) {
    if (!sender_->confirm(id)) net_->count_late(worker_);
  }
  SendPoll found = sender_->poll(now_ns);
  output.sent = std::move(found.sent);
  output.expired = found.expired.size();
}

}  // namespace understudy
