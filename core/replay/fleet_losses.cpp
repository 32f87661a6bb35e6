// Requests that lose their worker: they fail, start anew elsewhere, or go on elsewhere with the tokens so far.
#include <algorithm>
#include <utility>

#include "base/assert.hpp"
#include "replay/fleet.hpp"

namespace understudy {

namespace {

// The record of a request that went on after `first`.
RequestRecord joined(const RequestRecord& first, const RequestRecord& then) {
  RequestRecord out = then;
  if (first.queued_ns >= 0) out.queued_ns = first.queued_ns;
  if (first.first_admit_ns >= 0) {
    out.first_admit_ns = first.first_admit_ns;
    out.cached_first = first.cached_first;
    out.below_first = first.below_first;
  }
  out.output_tokens = first.output_tokens + then.output_tokens;
  if (first.output_tokens > 0) {
    out.first_token_ns = first.first_token_ns;
    out.second_token_ns = first.output_tokens > 1 ? first.second_token_ns : then.first_token_ns;
    if (then.output_tokens == 0) out.last_token_ns = first.last_token_ns;
  }
  out.preemptions += first.preemptions;
  out.cached_total += first.cached_total;
  out.looked_up += first.looked_up;
  for (std::size_t i = 0; i < out.below_total.size(); ++i) out.below_total[i] += first.below_total[i];
  out.parked_ns += first.parked_ns;
  out.room_wait_ns += first.room_wait_ns;
  return out;
}

}  // namespace

// A worker has drained for too long.
void Fleet::hand_back(std::size_t index) {
  if (lives_->state[index] != LifeState::Draining) return;
  std::vector<LostRequest> lost = take_requests(index);
  leave_sleepers(index);
  for (LostRequest& request : lost) lose(std::move(request), index, RequestLoss::kDrain);
  after_input(index);
  if (config_.router->queues()) release_queued();
}

// Takes the requests that a worker has now. Those that end now have ended.
std::vector<LostRequest> Fleet::take_requests(std::size_t index) {
  sync_worker(index);
  record_finished(index);
  Worker& worker = workers_[index];
  Engine& engine = *worker.engine;
  const std::vector<std::uint64_t> rows = lives_->rows[index];
  std::vector<LostRequest> lost;
  lost.reserve(rows.size());
  for (const std::uint64_t row : rows) {
    LostRequest& request = lost.emplace_back();
    if (config_.lost.survival == Survival::Migrate) request.gaps = engine.gaps_of(row);
    absorb(index, engine.cancel(row, now_ns_));
    const auto found = std::ranges::find(worker.finished, row, &RequestRecord::id);
    UNDERSTUDY_ASSERT(found != worker.finished.end(), "a cancelled request has ended");
    request.record = std::move(*found);
    worker.finished.erase(found);
  }
  return lost;
}

void Fleet::lose(LostRequest lost, std::size_t index, std::int32_t fault) {
  RequestRecord& record = lost.record;
  const std::uint64_t row = record.id;
  WorkerLoad& load = loads_[index];
  --load.outstanding_requests;
  load.outstanding_tokens -= tokens_of(row, index);
  lives_->end(row, index);
  if (config_.steps) config_.steps->split(index);
  if (tracks_) {
    config_.router->ended(row);
    started_[row] = false;
  }
  const Survival outcome = outcome_of(row, record.output_tokens);
  lives_->losses.push_back({now_ns_, row, index, outcome, fault, record.output_tokens});
  if (outcome == Survival::Fail) {
    record.reason = FinishReason::Failed;
    keep(record);
    return end_turn(row, now_ns_);
  }
  if (outcome == Survival::Migrate) {
    carry(std::move(lost));
  } else {
    lives_->carried.erase(row);
    lives_->emitted[row] = 0;
  }
  worker_of_[row] = -1;
  push_arrival(now_ns_ + config_.lost.delay_ns, row);
}

// `tokens`: those that its last worker gave it.
Survival Fleet::outcome_of(std::uint64_t row, std::uint32_t tokens) {
  const std::uint32_t times = ++lives_->lost_times[row];
  const LostRequests& lost = config_.lost;
  if (lost.survival == Survival::Fail) return Survival::Fail;
  if (lost.most_attempts > 0 && times >= lost.most_attempts) return Survival::Fail;
  if (lost.survival == Survival::Retry || tokens + carried_tokens(row) == 0) return Survival::Retry;
  const bool fits = std::ranges::any_of(pools_, [&](const Pool& pool) {
    return !asked_engine(pool).never_fits(prompt_of(row) + tokens, output_of(row) - tokens);
  });
  return fits ? Survival::Migrate : Survival::Retry;
}

void Fleet::carry(LostRequest lost) {
  const std::uint64_t row = lost.record.id;
  const auto [at, is_new] = lives_->carried.try_emplace(row);
  EarlierAttempts& earlier = at->second;
  if (is_new) {
    earlier = {std::move(lost.record), std::move(lost.gaps)};
    return;
  }
  if (lost.record.output_tokens > 0) earlier.gaps.push_back(lost.record.first_token_ns - earlier.record.last_token_ns);
  earlier.gaps.insert(earlier.gaps.end(), lost.gaps.begin(), lost.gaps.end());
  earlier.record = joined(earlier.record, lost.record);
}

// What a client sees of a request that went on on another worker.
void Fleet::join_attempts(RequestRecord& record) {
  const auto found = lives_->carried.find(record.id);
  if (found == lives_->carried.end()) return;
  const EarlierAttempts& earlier = found->second;
  const bool completed = record.reason == FinishReason::Length || record.reason == FinishReason::Stop;
  if (completed) {
    for (const std::int64_t gap_ns : earlier.gaps) columns_.gaps().add(gap_ns, 1);
    columns_.gaps().add(record.first_token_ns - earlier.record.last_token_ns, 1);
  }
  record = joined(earlier.record, record);
  lives_->carried.erase(found);
}

std::uint32_t Fleet::carried_tokens(std::uint64_t row) const {
  if (!lives_ || lives_->carried.empty()) return 0;
  const auto found = lives_->carried.find(row);
  return found == lives_->carried.end() ? 0 : found->second.record.output_tokens;
}

// After crashes no worker may be left, and none will start: requests that wait for one, in the router too, fail.
void Fleet::fail_stranded() {
  if (!lives_->last_crash || !ready_[static_cast<std::size_t>(RequestStage::Whole)].empty()) return;
  lives_->stranded.clear();
  std::vector<std::uint64_t> waiting;
  for (std::uint64_t row = 0; row < workload_.size(); ++row) {
    const bool has_ended = columns_.result().fate[row] != static_cast<std::uint8_t>(RequestFate::Unfinished);
    if (arrival_ns_[row] < 0 || has_ended) continue;
    const auto is_it = [row](const auto& rejection) { return rejection.first == static_cast<std::int64_t>(row); };
    if (std::ranges::none_of(rejections_, is_it)) waiting.push_back(row);
  }
  for (const std::uint64_t row : waiting) {
    if (tracks_) config_.router->ended(row);
    RequestLoss loss = *lives_->last_crash;
    loss.time_ns = now_ns_;
    loss.row = row;
    lives_->losses.push_back(loss);
    RequestRecord record;
    record.id = row;
    record.reason = FinishReason::Failed;
    record.finish_ns = now_ns_;
    keep(record);
    end_turn(row, now_ns_);
  }
}

}  // namespace understudy
