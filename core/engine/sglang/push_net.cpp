#include "engine/sglang/push_net.hpp"

#include <utility>

#include "base/assert.hpp"

namespace understudy {

void PushNet::open(RequestId id, std::uint32_t prefill, std::uint32_t decode) {
  const auto [at, is_new] = transfers_.try_emplace(id);
  UNDERSTUDY_ASSERT(is_new, "a request is handed over once");
  at->second.workers = {prefill, decode};
}

void PushNet::leave(RequestId id, Side side, std::int64_t now_ns) {
  transfers_.at(id).has_left[side] = true;
  forget_if_over(id, now_ns);
}

void PushNet::forget_if_over(RequestId id, std::int64_t now_ns) {
  Transfer& transfer = transfers_.at(id);
  if (!transfer.has_left[kPrefill] || !transfer.has_left[kDecode] || !transfer.pieces.empty()) return;
  if (has_far(transfer)) {
    forgotten_.push_back(id);
    if (transfer.record != nullptr) {  // a live server drops records that have ended
      transfer.record->failed = true;
      transfer.record->landed_ns = now_ns;
    }
  }
  transfers_.erase(id);
}

SglangTransferState PushNet::poll(RequestId id, Side side, std::int64_t now_ns) {
  const Transfer& transfer = transfers_.at(id);
  if (transfer.failed_ns[side] < now_ns) return SglangTransferState::Failed;
  if (side == kDecode && transfer.ready_ns >= now_ns) return SglangTransferState::Boot;
  if (side == kDecode && transfer.offered_ns == kNever) return SglangTransferState::Ready;
  if (side == kPrefill && transfer.offered_ns >= now_ns) return SglangTransferState::Boot;
  if (side == kPrefill && transfer.sent_ns == kNever) return SglangTransferState::Ready;
  return transfer.done_ns < now_ns ? SglangTransferState::Done : SglangTransferState::Moving;
}

void PushNet::mark_failed(RequestId id, Transfer& transfer, Side side, std::int64_t now_ns) {
  transfer.failed_ns[side] = std::min(transfer.failed_ns[side], now_ns);
  if (!transfer.pieces.empty()) transfer.pieces.resize(1);  // what has not begun to move stays
  send_news(transfer.workers[side], side == kPrefill ? PushNews::Reported : PushNews::Failed, id);
  note(transfer.workers[side], now_ns);
}

void PushNet::fail(RequestId id, Side side, std::int64_t now_ns) {
  Transfer& transfer = transfers_.at(id);
  mark_failed(id, transfer, side, now_ns - 1);  // known here at once
  if (side == kPrefill) mark_failed(id, transfer, kDecode, now_ns);
}

// ── Prefill side ──

void PushNet::send(RequestId id, std::uint32_t pages, bool last, std::int64_t now_ns) {
  Transfer& transfer = transfers_.at(id);
  if (last) transfer.sent_ns = now_ns;
  if (transfer.alone) {
    if (last) transfer.done_ns = now_ns;
    return note(transfer.workers[kPrefill], now_ns);
  }
  if (transfer.failed_ns[kPrefill] != kNever || transfer.failed_ns[kDecode] != kNever) return;
  UNDERSTUDY_ASSERT(transfer.record != nullptr, "KV is sent to a decode worker that has memory for it");
  if (transfer.record->posted_ns < 0) transfer.record->posted_ns = now_ns;
  transfer.pieces.push_back({pages, last});
  if (transfer.pieces.size() == 1) start(id, transfer, now_ns);
}

void PushNet::start(RequestId id, Transfer& transfer, std::int64_t now_ns) {
  const std::uint64_t bytes = transfer.pieces.front().pages * net_.bytes_per_block();
  transfer.started_ns = now_ns;
  transfer.record->bytes += bytes;
  net_.move(transfer.workers[kPrefill], transfer.workers[kDecode], bytes, now_ns, *this,
            {static_cast<std::uint32_t>(id >> 32), static_cast<std::uint32_t>(id), 0});
}

void PushNet::landed(const Purpose& purpose, std::int64_t time_ns) {
  const RequestId id = (RequestId{purpose.role} << 32) | purpose.index;
  Transfer& transfer = transfers_.at(id);
  const Piece piece = transfer.pieces.front();
  transfer.pieces.pop_front();
  if (!has_far(transfer)) add_busy(transfer.started_ns + net_.fixed_ns(), time_ns);
  if (!transfer.pieces.empty()) return start(id, transfer, time_ns);
  transfer.still_ns = time_ns;
  const bool has_failed = transfer.failed_ns[kPrefill] != kNever || transfer.failed_ns[kDecode] != kNever;
  if (has_failed) {
    if (transfer.reported_ns != kNever) send_news(transfer.workers[kDecode], PushNews::Drained, id);
    note(transfer.workers[kDecode], time_ns);  // held pages may be freed
    return forget_if_over(id, time_ns);
  }
  if (!piece.last) return;
  HandOffRecord& record = *std::exchange(transfer.record, nullptr);
  record.landed_ns = time_ns;
  if (net_.draws_failure(id)) {
    record.failed = true;
    mark_failed(id, transfer, kPrefill, time_ns);
    mark_failed(id, transfer, kDecode, time_ns);
    return;
  }
  transfer.done_ns = time_ns;
  send_news(transfer.workers[kDecode], PushNews::Done, id);
  for (const std::uint32_t worker : transfer.workers) note(worker, time_ns);
}

// Pieces land in the order of time; one that began early joins the times before its end.
void PushNet::add_busy(std::int64_t from_ns, std::int64_t to_ns) {
  if (to_ns <= from_ns) return;
  while (!busy_.empty() && busy_.back().second >= from_ns) {
    from_ns = std::min(from_ns, busy_.back().first);
    busy_.pop_back();
  }
  busy_.emplace_back(from_ns, to_ns);
}

std::int64_t PushNet::busy_ns() const noexcept {
  std::int64_t sum = 0;
  for (const auto& [from_ns, to_ns] : busy_) sum += to_ns - from_ns;
  return sum;
}

// ── Decode side ──

void PushNet::offer(RequestId id, std::uint32_t prefix, std::int64_t now_ns) {
  Transfer& transfer = transfers_.at(id);
  transfer.prefix = prefix;
  transfer.offered_ns = now_ns;
  if (transfer.alone) {
    transfer.done_ns = now_ns;
    return note(transfer.workers[kDecode], now_ns);
  }
  if (is_far(transfer.workers[kPrefill])) {  // that side counts the bytes
    if (limits_.wait_ns != kNever) waits_[1].push_back({now_ns + limits_.wait_ns, id});
    return send_news(transfer.workers[kPrefill], PushNews::Offered, id, prefix);
  }
  HandOffRecord record;
  record.request = record.peer_request = id;
  record.from = transfer.workers[kPrefill];
  record.to = transfer.workers[kDecode];
  record.posted_ns = -1;
  record.landed_ns = kNever;
  record.offered_ns = now_ns;
  transfer.record = &net_.add_record(record);
  note(transfer.workers[kPrefill], now_ns);
}

void PushNet::report_failure(RequestId id, std::int64_t now_ns) {
  Transfer& transfer = transfers_.at(id);
  if (transfer.reported_ns != kNever) return;
  transfer.reported_ns = now_ns;
  if (is_far(transfer.workers[kPrefill]) && limits_.drain_ns != kNever) {
    waits_[2].push_back({now_ns + limits_.drain_ns, id});
  }
  if (transfer.failed_ns[kPrefill] == kNever) mark_failed(id, transfer, kPrefill, now_ns);
  if (!transfer.pieces.empty()) return;
  send_news(transfer.workers[kDecode], PushNews::Drained, id);
  if (transfer.offered_ns != kNever) note(transfer.workers[kDecode], now_ns);
}

// The prefill worker answers at once when nothing of the request moves any more.
bool PushNet::is_drained(RequestId id, std::int64_t now_ns) {
  const Transfer& transfer = transfers_.at(id);
  if (is_far(transfer.workers[kPrefill])) return transfer.drained_ns < now_ns;
  return transfer.pieces.empty() && transfer.reported_ns < now_ns && transfer.still_ns < now_ns;
}

// ── Notes ──

void PushNet::note(std::uint32_t worker, std::int64_t now_ns) {
  if (worker == kUnknown || is_far(worker)) return;
  if (notes_.size() <= worker) notes_.resize(worker + 1);
  std::vector<std::int64_t>& times = notes_[worker];
  times.insert(std::ranges::upper_bound(times, now_ns + 1), now_ns + 1);
  net_.reach(worker);
}

std::int64_t PushNet::next_after(std::uint32_t worker, std::int64_t after_ns) const noexcept {
  if (worker >= notes_.size()) return kNever;
  const auto next = std::ranges::upper_bound(notes_[worker], after_ns);
  return next == notes_[worker].end() ? kNever : *next;
}

void PushNet::look(std::uint32_t worker, std::int64_t now_ns) {
  if (worker >= notes_.size()) return;
  std::vector<std::int64_t>& times = notes_[worker];
  times.erase(times.begin(), std::ranges::upper_bound(times, now_ns));
}

}  // namespace understudy
