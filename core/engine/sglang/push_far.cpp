// Pushed KV between processes: messages to the other side of a request, and how long one side waits for them.
#include <algorithm>

#include "engine/sglang/push_net.hpp"

namespace understudy {

void PushNet::set_far(std::uint32_t worker) {
  if (far_.size() <= worker) far_.resize(worker + 1);
  far_[worker] = true;
}

void PushNet::open_far(RequestId id, Side side, std::uint32_t worker, std::uint32_t far, bool connected,
                       std::int64_t now_ns) {
  open(id, side == kPrefill ? worker : far, side == kPrefill ? far : worker);
  Transfer& transfer = transfers_.at(id);
  transfer.has_left[side == kPrefill ? kDecode : kPrefill] = true;
  if (!connected) transfer.ready_ns = kNever;
  if (side == kPrefill && limits_.boot_ns != kNever) waits_[0].push_back({now_ns + limits_.boot_ns, id});
}

void PushNet::open_alone(RequestId id, Side side, std::uint32_t worker) {
  open(id, worker, worker);
  Transfer& transfer = transfers_.at(id);
  transfer.alone = true;
  transfer.has_left[side == kPrefill ? kDecode : kPrefill] = true;
  if (side == kPrefill) transfer.offered_ns = -1;
}

void PushNet::connect(RequestId id, std::int64_t now_ns) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return;
  found->second.ready_ns = std::min(found->second.ready_ns, now_ns);
  note(found->second.workers[kDecode], now_ns);
}

void PushNet::receive(const PushMessage& from, std::int64_t now_ns) {
  const auto found = transfers_.find(from.id);
  if (found == transfers_.end()) return;
  Transfer& transfer = found->second;
  switch (from.news) {
    case PushNews::Offered:
      if (transfer.offered_ns != kNever) return;
      transfer.workers[kDecode] = from.worker;
      if (transfer.failed_ns[kPrefill] != kNever) return send_news(from.worker, PushNews::Failed, from.id);
      return offer(from.id, from.prefix, now_ns);
    case PushNews::Reported:
      transfer.workers[kDecode] = from.worker;
      return report_failure(from.id, now_ns);
    case PushNews::Done:
      if (transfer.offered_ns == kNever || transfer.done_ns != kNever) return;
      transfer.done_ns = now_ns;
      return note(transfer.workers[kDecode], now_ns);
    case PushNews::Failed:
      return mark_failed(from.id, transfer, kDecode, now_ns);
    case PushNews::Drained:
      if (transfer.reported_ns == kNever) return;
      transfer.drained_ns = std::min(transfer.drained_ns, now_ns);
      return note(transfer.workers[kDecode], now_ns);
  }
}

void PushNet::lose(std::uint32_t far, std::int64_t now_ns) {
  for (auto& [id, transfer] : transfers_) {
    for (const Side side : {kPrefill, kDecode}) {
      const std::uint32_t other = transfer.workers[side == kPrefill ? kDecode : kPrefill];
      if (other != far || transfer.done_ns != kNever) continue;
      if (side == kDecode) {
        transfer.drained_ns = std::min(transfer.drained_ns, now_ns);  // no process writes to its pages
      }
      mark_failed(id, transfer, side, now_ns);
    }
  }
}

void PushNet::abandon(std::uint32_t worker, std::int64_t now_ns) {
  std::vector<RequestId> lost;
  for (const auto& [id, transfer] : transfers_) {
    if (std::ranges::find(transfer.workers, worker) != transfer.workers.end()) lost.push_back(id);
  }
  std::ranges::sort(lost);
  for (const RequestId id : lost) {
    Transfer& transfer = transfers_.at(id);
    // A request of the decode side alone has its worker at both ends.
    const bool decodes = transfer.workers[kPrefill] != worker || (transfer.alone && transfer.has_left[kPrefill]);
    const Side side = decodes ? kDecode : kPrefill;
    const Side other = side == kPrefill ? kDecode : kPrefill;
    if (transfer.done_ns == kNever) mark_failed(id, transfer, other, now_ns);
    transfer.has_left[side] = true;
    forget_if_over(id, now_ns);
  }
  if (worker < notes_.size()) notes_[worker].clear();
}

void PushNet::send_news(std::uint32_t worker, PushNews news, RequestId id, std::uint32_t prefix) {
  if (worker != kUnknown && is_far(worker)) messages_.push_back({worker, news, id, prefix});
}

// ── Limits ──

bool PushNet::still_waits(std::size_t kind, RequestId id) const noexcept {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return false;
  const Transfer& transfer = found->second;
  if (kind == 0) return transfer.offered_ns == kNever && transfer.failed_ns[kPrefill] == kNever;
  if (kind == 1) return transfer.done_ns == kNever && transfer.failed_ns[kDecode] == kNever;
  return transfer.drained_ns == kNever;
}

std::int64_t PushNet::next_limit_ns() noexcept {
  std::int64_t next = kNever;
  for (std::size_t kind = 0; kind < waits_.size(); ++kind) {
    std::deque<Limit>& waits = waits_[kind];
    while (!waits.empty() && !still_waits(kind, waits.front().id)) waits.pop_front();
    if (!waits.empty()) next = std::min(next, waits.front().time_ns);
  }
  return next;
}

void PushNet::expire(std::int64_t now_ns) {
  for (std::size_t kind = 0; kind < waits_.size(); ++kind) {
    std::deque<Limit>& waits = waits_[kind];
    for (; !waits.empty() && waits.front().time_ns <= now_ns; waits.pop_front()) {
      const auto [time_ns, id] = waits.front();
      if (!still_waits(kind, id)) continue;
      Transfer& transfer = transfers_.at(id);
      if (kind == 2) {
        transfer.drained_ns = time_ns;
        note(transfer.workers[kDecode], time_ns);
      } else {
        mark_failed(id, transfer, kind == 0 ? kPrefill : kDecode, time_ns);
      }
    }
  }
}

}  // namespace understudy
