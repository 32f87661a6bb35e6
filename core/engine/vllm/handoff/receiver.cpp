#include "engine/vllm/handoff/receiver.hpp"

namespace understudy {

void KvReceiver::pull(Pull pull) {
  unpulled_.erase(pull.request);
  pulls_.push_back(std::move(pull));
}

void KvReceiver::ended(RequestId id, std::uint32_t peer, RequestId peer_request) {
  waits_.erase(id);
  if (unpulled_.erase(id) > 0) notify_.push_back({id, peer, peer_request, {}});
}

ReceiveOrders KvReceiver::close_schedule(std::int64_t now_ns) {
  ReceiveOrders orders{std::exchange(notify_, {}), {}};
  for (Pull& pull : pulls_) orders.pulls.push_back(std::move(pull));
  pulls_.clear();
  if (waits_.empty() || (beat_ && now_ns - last_ns_ < interval_ns_)) return orders;
  beat_ = true;
  last_ns_ = now_ns;
  for (const auto& [id, peer] : waits_) orders.heartbeat.push_back(id);
  return orders;
}

}  // namespace understudy
