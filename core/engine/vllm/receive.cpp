// Receive tokens: one for each sampling entry of the batch, or several with speculation.
#include <algorithm>

#include "engine/vllm/engine.hpp"

namespace understudy {

bool VllmEngine::live(const Scheduled& turn) const noexcept {
  return requests_[turn.slot].id == turn.id && requests_[turn.slot].status != RequestStatus::Finished;
}

std::uint32_t VllmEngine::outputs_left(const EngineRequest& request) const noexcept {
  return std::min(request.spec.outputs() - request.outputs(), config_.max_model_len - request.known);
}

// Receive the tokens of a batch, in its order; a request with its last token is freed at once.
void VllmEngine::receive_tokens(const std::vector<Scheduled>& turns, std::int64_t end_ns) {
  const std::uint64_t step = token_log_.next_step();
  token_log_.end_step(end_ns);
  bool finished = false;
  if (loads_) free_deferred(!turns.empty());
  for (const Scheduled& turn : turns) {
    if (&turn != &turns.back()) requests_[(&turn)[1].slot].warm();
    if (!turn.samples || !live(turn) || !receive_token(turn, step)) continue;
    EngineRequest& request = requests_[turn.slot];
    if (request.status != RequestStatus::Running) queues_.remove(turn.slot);
    retire(request, false, end_ns);
    log_.finished.push_back(turn.id);
    log_.ended.emplace_back(turn.id, request.spec.name);
    complete(turn.slot, end_ns);
    finished = true;
  }
  if (token_log_.crowded()) fold_token_log();
  if (!finished) return;
  refusal_.stands = false;
  std::erase_if(running_, [this](RequestSlot slot) { return requests_[slot].status == RequestStatus::Finished; });
}

// Whether it was the last one.
bool VllmEngine::receive_token(const Scheduled& turn, std::uint64_t step) {
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
    const std::uint32_t computed = certain ? request.computed - request.ahead : 0;
    if (grouped_ != nullptr && refusal_.stands) {
      const std::optional<RequestSlot> head = queues_.candidate();
      if (head && grouped_->keys_for(requests_[*head], request, computed)) refusal_.stands = false;
    }
    kv_->received(request, computed);
  }
  if (const std::uint32_t fresh = request.known - known; fresh > 0) {
    fruitless_preemptions_ = 0;
    effects_.tokens.push_back({request.id, fresh});
    if (request.tokens.empty()) request.first_burst = fresh;
    request.tokens.add(step, 1);
  }
  return request.outputs() >= request.spec.outputs() || request.known >= config_.max_model_len;
}

// Drop steps before the first token of every present request: no request reads them.
void VllmEngine::fold_token_log() {
  std::uint64_t oldest = token_log_.next_step();
  for (const auto& [id, slot] : slots_) {
    const TokenRuns& runs = requests_[slot].tokens;
    if (!runs.empty()) oldest = std::min(oldest, runs.front().first_step);
  }
  token_log_.fold(oldest, slots_.size());
}

// ── Speculation ──

// All tokens of a burst but its last have been computed by the step; blocks that it did not need go back.
void VllmEngine::receive_burst(EngineRequest& request) {
  const std::uint32_t tokens = bursts_.draw(outputs_left(request));
  if (tokens == 0) return;
  ++totals_.burst_steps;
  totals_.burst_tokens += tokens;
  request.known += tokens;
  request.computed = request.known - 1;
  kv_->trim(request, request.computed);
}

// Receive one token and the accepted drafts; rejected drafts are dropped, but their blocks stay.
void VllmEngine::receive_drafts(EngineRequest& request, const Scheduled& turn) {
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
  request.computed -= rejected;
  if (config_.async_scheduling) {
    request.ahead -= rejected + tokens;
  } else {
    request.drafts = config_.speculation.tokens;
    // Accepted drafts behind the last token do not count as computed.
    if (config_.speculation.keys_in_update) request.computed -= 1 + accepted - tokens;
  }
}

}  // namespace understudy
