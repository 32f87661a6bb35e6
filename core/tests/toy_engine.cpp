#include "toy_engine.hpp"

#include <algorithm>
#include <utility>

namespace understudy {

std::unique_ptr<Engine> ToyConfig::make(const EngineSite& site) const {
  return std::make_unique<ToyEngine>(*this, site);
}

Effects& ToyEngine::fresh() {
  effects_.clear();
  return effects_;
}

const Effects& ToyEngine::done() {
  const EngineSnapshot now = snapshot();
  effects_.has_events = !events_.batch.records.empty();
  effects_.phase = now.phase;
  effects_.wake_ns = now.wake_ns;
  return effects_;
}

const Effects& ToyEngine::submit(RequestSpec spec, std::int64_t now_ns) {
  if (spec.prompt_tokens == 0) throw Error(ErrorKind::InvalidArgument, "request ", spec.id, ": the prompt is empty");
  fresh();
  if (!in_step_) now_ns_ = std::max(now_ns_, now_ns);
  if (waiting_.size() >= config_.queue_limit) {
    finish(waiting_.front(), FinishReason::Cancelled, now_ns);
    waiting_.pop_front();
  }
  Request& request = waiting_.emplace_back();
  request.spec = std::move(spec);
  request.record.queued_ns = now_ns;
  return done();
}

const Effects& ToyEngine::cancel(RequestId id, std::int64_t now_ns) {
  fresh();
  const auto is_it = [id](const Request& request) { return request.spec.id == id; };
  if (const auto at = std::ranges::find_if(waiting_, is_it); at != waiting_.end()) {
    finish(*at, FinishReason::Cancelled, now_ns);
    waiting_.erase(at);
  } else if (const auto run = std::ranges::find_if(running_, is_it); run != running_.end()) {
    finish(*run, FinishReason::Cancelled, now_ns);
    running_.erase(run);
  }
  return done();
}

const Effects& ToyEngine::begin_step(std::int64_t now_ns) {
  if (in_step_) throw Error(ErrorKind::WrongState, "begin_step before the step in progress has ended");
  fresh();
  now_ns_ = now_ns;
  while (!waiting_.empty() && running_.size() < config_.max_running) {
    running_.push_back(std::move(waiting_.front()));
    running_.back().record.first_admit_ns = now_ns;
    waiting_.pop_front();
  }
  if (running_.empty()) return done();
  StepLoad load;
  load.clear();
  for (const Request& request : running_) {
    ++load.requests;
    load.tokens += request.computed ? 1 : request.spec.prompt_tokens;
  }
  load.mocker.decode_requests = running_.size();
  now_ns_ = now_ns + timing_.duration_ns(load, config_.num_gpu_blocks * config_.block_size);
  in_step_ = true;
  ++steps_;
  return done();
}

const Effects& ToyEngine::end_step(std::int64_t now_ns) {
  if (!in_step_) throw Error(ErrorKind::WrongState, "end_step without a step in progress");
  fresh();
  in_step_ = false;
  now_ns_ = now_ns;
  for (Request& request : running_) {
    if (!std::exchange(request.computed, true)) {
      request.record.first_token_ns = now_ns;
      store_prompt(request, now_ns);
    } else if (request.record.second_token_ns < 0) {
      request.record.second_token_ns = now_ns;
    }
    if (request.record.output_tokens > 0) request.gaps_ns.push_back(now_ns - request.record.last_token_ns);
    request.record.last_token_ns = now_ns;
    ++request.record.output_tokens;
    effects_.tokens.push_back({request.spec.id, 1});
    if (request.record.output_tokens >= std::max(request.spec.outputs(), 1u)) {
      finish(request, FinishReason::Length, now_ns);
    }
  }
  std::erase_if(running_, [](const Request& request) { return request.record.finish_ns >= 0; });
  return done();
}

void ToyEngine::finish(Request& request, FinishReason reason, std::int64_t now_ns) {
  request.record.id = request.spec.id;
  request.record.name = request.spec.name;
  request.record.reason = reason;
  request.record.finish_ns = now_ns;
  if (reason != FinishReason::Cancelled) {
    gaps_ns_.insert(gaps_ns_.end(), request.gaps_ns.begin(), request.gaps_ns.end());
  }
  effects_.finished.push_back(request.record);
}

void ToyEngine::store_prompt(const Request& request, std::int64_t now_ns) {
  if (!request.spec.identities) return;
  std::vector<BlockIdentity> blocks;
  request.spec.identities->extend(blocks, request.spec.prompt_tokens / config_.block_size);
  bool starts = true;
  for (const BlockIdentity& block : blocks) {
    const bool known = cached_.contains(block.sequence_hash());
    if (!known && cached_.size() >= config_.num_gpu_blocks) return;
    if (known) continue;
    cached_.emplace(block.sequence_hash(), block);
    if (!config_.events) continue;
    EventRecord row;
    row.id = next_event_++;
    row.identity = block;
    row.starts = std::exchange(starts, false);
    events_.batch.records.push_back(row);
    events_.time_ns.push_back(now_ns);
  }
}

EngineSnapshot ToyEngine::snapshot() const {
  EngineSnapshot now;
  now.phase = in_step_ ? Phase::InStep : waiting_.empty() && running_.empty() ? Phase::Idle : Phase::Ready;
  now.wake_ns = now.phase == Phase::Idle ? Effects::kNever : now_ns_;
  now.running = running_.size();
  now.waiting = waiting_.size();
  now.free_blocks = config_.num_gpu_blocks - cached_.size();
  now.cached_blocks = cached_.size();
  now.stored_blocks = cached_.size();
  now.totals.steps = steps_;
  return now;
}

void ToyEngine::take_gaps(GapSum& out) {
  for (const std::int64_t gap_ns : std::exchange(gaps_ns_, {})) out.add(gap_ns, 1);
}

void ToyEngine::take_events(TimedEvents& out) {
  out.batch.records.clear();
  out.time_ns.clear();
  std::swap(out, events_);
}

void ToyEngine::has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = cached_.contains(blocks[i].sequence_hash());
}

std::vector<BlockIdentity> ToyEngine::resident(std::size_t) const {
  std::vector<BlockIdentity> out;
  for (const auto& [hash, block] : cached_) out.push_back(block);
  return out;
}

}  // namespace understudy
