// The update: tokens that a step has sampled, and reports of the connector.
#include <algorithm>
#include <utility>

#include "engine/vllm/groups/grouped_backend.hpp"
#include "engine/vllm/scheduler.hpp"

namespace understudy {

void Scheduler::update_from_output(const std::vector<Scheduled>& turns, std::int64_t end_ns) {
  const std::uint64_t step = token_log_.next_step();
  token_log_.end_step(end_ns);
  bool finished = false;
  if (loads_ && !turns.empty()) free_deferred();
  for (const Scheduled& turn : turns) {
    if (&turn != &turns.back()) requests_[(&turn)[1].slot].warm();
    if (!turn.samples || !live(turn) || !receive_token(turn, step)) continue;
    EngineRequest& request = requests_[turn.slot];
    if (request.status != RequestStatus::Running) waiting_.remove(turn.slot);
    log_.finished.push_back(turn.id);
    log_.ended.emplace_back(turn.id, request.spec.name);
    finish(turn.slot, end_ns);
    finished = true;
  }
  if (token_log_.crowded()) fold_token_log();
  if (!finished) return;
  refusal_.stands = false;
  std::erase_if(running_, [this](RequestSlot slot) { return requests_[slot].status == RequestStatus::Finished; });
}

// Whether it was the last one.
bool Scheduler::receive_token(const Scheduled& turn, std::uint64_t step) {
  EngineRequest& request = requests_[turn.slot];
  const std::uint32_t known = request.known;
  if (bursts_.on()) {
    receive_burst(request);
  } else if (config_.speculation.tokens > 0) {
    receive_drafts(request, turn);
  } else if (request.spec.max_tokens > 0) {
    ++request.known;
  }
  if (request.status == RequestStatus::Running) {
    const bool async = config_.async_scheduling;
    if (async && config_.speculation.tokens == 0) --request.ahead;
    const bool certain = async || bursts_.on() || config_.speculation.keys_in_update;
    const std::uint32_t computed = certain ? request.num_computed_tokens - request.ahead : 0;
    if (refusal_.stands && may_name_for_head(request, computed)) refusal_.stands = false;
    kv_.received(request, computed);
  }
  if (const std::uint32_t fresh = request.known - known; fresh > 0) {
    note_progress();
    effects_.tokens.push_back({request.id, fresh});
    if (request.tokens.empty()) request.first_burst = fresh;
    request.tokens.add(step, 1);
  }
  return request.outputs() >= request.spec.outputs() || request.known >= config_.max_model_len;
}

// Whether blocks of a running request that get their names now may lengthen the hit of the head of the queue. (With one
// group the schedule that computes them has named them.)
bool Scheduler::may_name_for_head(EngineRequest& request, std::uint32_t computed) {
  if (grouped_ == nullptr) return false;
  const std::optional<RequestSlot> head = waiting_.candidate();
  return head && grouped_->keys_for(requests_[*head], request, computed);
}

// Drop steps before the first token of every present request: no request reads them.
void Scheduler::fold_token_log() {
  std::uint64_t oldest = token_log_.next_step();
  for (const auto& [id, slot] : slots_) {
    const TokenRuns& runs = requests_[slot].tokens;
    if (!runs.empty()) oldest = std::min(oldest, runs.front().first_step);
  }
  token_log_.fold(oldest, slots_.size());
}

// ── The connector's worker ──

bool Scheduler::update_from_kv_xfer_finished(const ConnectorOutput& output, std::int64_t now_ns) {
  if (output.empty()) return false;
  connector_.update_connector_output(output);
  bool failed = false;
  for (const RequestId id : output.received) {
    const auto orphan = left_.orphans.find(id);
    if (orphan != left_.orphans.end()) {
      if (freeable(orphan->second.step)) {
        kv_.release_table(std::move(orphan->second.table));
      } else {
        left_.deferred.push_back({steps_.scheduled, std::move(orphan->second.table)});
      }
      left_.orphans.erase(orphan);
      continue;
    }
    const auto found = slots_.find(id);
    if (found == slots_.end()) continue;
    EngineRequest& request = requests_[found->second];
    request.loaded = true;
    request.load_failed = std::ranges::binary_search(output.failed, id);
    if (!request.load_failed || recomputes_) continue;
    finish_request(found->second, FinishReason::Failed, now_ns);
    failed = true;
  }
  for (const RequestId id : output.sent) {
    KvTable table = left_.kept.take(id);
    if (!table.empty()) kv_.release_table(std::move(table));
  }
  if (!output.sent.empty() || !output.received.empty()) refusal_.stands = false;
  return failed;
}

// ── Speculation ──

// All tokens of a burst but its last have been computed by the step; blocks that it did not need go back.
void Scheduler::receive_burst(EngineRequest& request) {
  const std::uint32_t tokens = bursts_.draw(outputs_left(request));
  if (tokens == 0) return;
  ++totals_.burst_steps;
  totals_.burst_tokens += tokens;
  request.known += tokens;
  request.num_computed_tokens = request.known - 1;
  kv_.trim(request, request.num_computed_tokens);
}

// Receive one token and the accepted drafts; rejected drafts are dropped, but their blocks stay.
void Scheduler::receive_drafts(EngineRequest& request, const Scheduled& turn) {
  const bool running = request.status == RequestStatus::Running;  // else it was preempted meanwhile
  std::uint32_t accepted = 0;
  if (!turn.blank && turn.drafts > 0) {
    const auto* known = request.spec.accepts.get();
    accepted = known == nullptr ? acceptance_.accept(turn.drafts)
                                : std::min((*known)[request.outputs() % known->size()], turn.drafts);
  }
  if (turn.drafts > 0) {
    ++totals_.draft_rounds;
    totals_.drafted_tokens += turn.drafts;
    totals_.accepted_tokens += accepted;
    for (std::uint32_t place = 0; place < accepted; ++place) ++accepted_at_[place];
  }
  const std::uint32_t tokens = std::min(1 + accepted, outputs_left(request));
  request.known += tokens;
  if (!running) return;
  const std::uint32_t rejected = turn.drafts - accepted;
  request.num_computed_tokens -= rejected;
  if (config_.async_scheduling) {
    request.ahead -= rejected + tokens;
  } else {
    request.drafts = config_.speculation.tokens;
    // Accepted drafts behind the last token do not count as computed.
    if (config_.speculation.keys_in_update) request.num_computed_tokens -= 1 + accepted - tokens;
  }
}

}  // namespace understudy
