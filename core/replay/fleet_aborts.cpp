// Clients that abort their requests: wherever a request is, it ends.
#include <algorithm>

#include "replay/fleet.hpp"

namespace understudy {

bool Fleet::has_aborts() const {
  if (config_.play_limits.duration_ns > 0) return true;
  return std::ranges::any_of(workload_.abort_after_ns, [](std::int64_t after_ns) { return after_ns >= 0; });
}

// Plans the abort of a request that has arrived.
void Fleet::push_abort(std::uint64_t row) {
  if (aborted_.empty() || workload_.abort_after_ns.empty() || workload_.abort_after_ns[row] < 0) return;
  const std::int64_t after_ns = workload_.abort_after_ns[row];
  if (after_ns >= Engine::kNever - now_ns_) return;
  queue_.push(now_ns_ + after_ns, EventClass::Abort, row, row);
}

// Ends a request in the router's queue, on its worker, or on its way from the prefill to the decode worker. No effect
// on one that has ended.
void Fleet::abort(std::uint64_t row) {
  if (columns_.result().fate[row] != static_cast<std::uint8_t>(RequestFate::Unfinished)) return;
  aborted_[row] = true;
  if (pushes_ && worker_of_[row] >= 0) return abort_pushed(row);
  if (worker_of_[row] < 0) {
    const auto is_it = [row](const auto& rejection) { return rejection.first == static_cast<std::int64_t>(row); };
    if (std::ranges::any_of(rejections_, is_it)) return;
    if (tracks_) config_.router->ended(row);
    if (config_.router->queues()) release_queued();
    return end_aborted(row);
  }
  if (!prefilling_.empty() && prefilling_[row] && columns_.result().handoff.prefill_done_ns[row] >= 0) {
    return drop_between_workers(row);
  }
  const std::size_t worker = lead(static_cast<std::size_t>(worker_of_[row]));
  sync_worker(worker);
  leave_sleepers(worker);
  absorb(worker, workers_[worker].engine->cancel(row, now_ns_));
  after_input(worker);
}

// The prompt is computed, and no decode worker will read it: its blocks wait for the end of their lease.
void Fleet::drop_between_workers(std::uint64_t row) {
  if (columns_.result().fate[row] != static_cast<std::uint8_t>(RequestFate::Unfinished)) return;
  prefilling_[row] = false;
  prefill_identities_.erase(row);
  if (tracks_ && decode_worker_[row] >= 0) config_.router->ended(row);
  end_aborted(row);
}

// Records a request that no worker has.
void Fleet::end_aborted(std::uint64_t row) {
  RequestRecord record;
  record.id = row;
  record.reason = FinishReason::Cancelled;
  record.finish_ns = now_ns_;
  keep(record);
  end_turn(row, now_ns_);
}

}  // namespace understudy
