#include "engine/vllm/handoff/sender.hpp"

#include <algorithm>
#include <limits>

namespace understudy {

SendOrders KvSender::close_schedule() {
  std::ranges::sort(orders_.in_batch);
  std::ranges::sort(orders_.not_processed);
  return std::exchange(orders_, {});
}

void KvSender::begin(const SendOrders& orders) {
  known_.insert(orders.in_batch.begin(), orders.in_batch.end());
  for (const RequestId id : orders.not_processed) known_.erase(id);
  for (const auto& [id, deadline_ns] : orders.to_send) {
    if (known_.contains(id)) leases_.emplace_back(id, deadline_ns);
  }
}

void KvSender::extend(std::span<const RequestId> ids, std::int64_t now_ns) {
  for (auto& [id, deadline_ns] : leases_) {
    if (std::ranges::find(ids, id) != ids.end()) deadline_ns = std::max(deadline_ns, now_ns + extension_ns_);
  }
}

bool KvSender::confirm(RequestId id) {
  if (known_.erase(id) == 0) return false;  // after its lease had ended
  std::erase_if(leases_, [id](const auto& lease) { return lease.first == id; });
  confirmed_.push_back(id);
  return true;
}

SendPoll KvSender::poll(std::int64_t now_ns) {
  SendPoll poll{std::exchange(confirmed_, {}), {}};
  std::erase_if(leases_, [&](const auto& lease) {
    if (now_ns < lease.second) return false;
    poll.expired.push_back(lease.first);
    known_.erase(lease.first);
    return true;
  });
  std::ranges::sort(poll.expired);
  poll.sent.insert(poll.sent.end(), poll.expired.begin(), poll.expired.end());
  std::ranges::sort(poll.sent);
  return poll;
}

std::int64_t KvSender::next_deadline_ns() const {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  for (const auto& [id, deadline_ns] : leases_) next = std::min(next, deadline_ns);
  return next;
}

}  // namespace understudy
