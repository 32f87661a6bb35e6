#include "engine/trtllm/executor.hpp"

#include <algorithm>
#include <unordered_set>

#include "base/errors.hpp"

namespace understudy {

TrtExecutor::TrtExecutor(const TrtSettings& settings, bool events)
    : settings_(settings),
      memory_(plan_trt_memory(settings)),
      chunk_unit_(settings.chunk_unit()),
      store_(memory_.layout),
      events_(events ? std::make_unique<TrtEvents>(memory_.layout, memory_.announced_blocks()) : nullptr),
      tree_(store_, events_.get(), settings.enable_partial_reuse),
      length_limit_(std::min(settings.max_seq_len, memory_.max_seq_len)) {}

void TrtExecutor::submit(TrtArrival arrival) {
  auto made = std::make_unique<TrtRequest>();
  TrtRequest& request = *made;
  request.id = arrival.id;
  request.prompt = request.chunk = arrival.prompt.size();
  request.tokens = std::move(arrival.prompt);
  request.given_outputs = std::move(arrival.outputs);
  request.first_output = arrival.first_output;
  request.max_new = arrival.max_new;
  request.eos_at = arrival.eos_at;
  request.priority = arrival.priority;
  request.scope = arrival.scope;
  requests_[arrival.id] = std::move(made);
  auto place = waiting_.end();
  if (settings_.waiting_queue_policy == TrtWaiting::Priority) {
    place = std::ranges::find_if(waiting_, [&](const TrtRequest* one) { return one->priority < request.priority; });
  }
  waiting_.insert(place, &request);
}

std::vector<const TrtRequest*> TrtExecutor::with_caches() const {
  std::vector<const TrtRequest*> out;
  for (const TrtRequest* const request : active_) {
    if (request->cache != nullptr) out.push_back(request);
  }
  std::ranges::sort(out, {}, &TrtRequest::cache_number);
  return out;
}

void TrtExecutor::finish() {
  try {
    finish_pass();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::CapacityExhausted) throw;
    dead_ = true;
    death_ = error.what();
  }
}

void TrtExecutor::finish_pass() {
  const bool runs = !batch_.empty();
  if (!settings_.overlap) {
    pause_recomputed();
    if (!runs) return;
    advance_contexts();
    sample(batch_);
    commit_contexts();
    answer(batch_);
    return;
  }
  if (previous_) sample(*previous_);
  pause_recomputed();
  if (runs) {
    advance_contexts();
    commit_contexts();
  }
  if (previous_) answer(*previous_);
  previous_.reset();
  if (!runs) return;
  for (TrtRequest* const request : batch_.generation) {
    if (request->state != TrtState::Complete && request->ends_with_next()) request->state = TrtState::ToComplete;
  }
  previous_ = batch_;
}

// A block that was matched in part may be committed again.
void TrtExecutor::free_cache(TrtRequest& request) {
  committing_ = &request;
  request.cache.reset();
  committing_ = nullptr;
}

// Outputs become part of the prompt.
void TrtExecutor::pause_recomputed() {
  for (TrtRequest* const request : recomputed_) {
    if (request->state == TrtState::Complete) continue;
    const std::uint32_t first = request->outputs - request->generated;
    const std::uint32_t given = std::min(request->given_outputs.size(), request->outputs);
    if (first < given) request->tokens.append_from(request->given_outputs, first, given);
    const std::uint32_t made = std::max(first, given);
    request->tokens.append({request->first_output + made, request->outputs - made});
    request->max_new -= request->generated;
    request->prompt = request->chunk = request->tokens.size();
    request->generated = 0;
    request->position = request->reused = 0;
    request->state = TrtState::Context;
  }
}

void TrtExecutor::advance_contexts() {
  for (const TrtBatch::Chunk& chunk : batch_.contexts) {
    TrtRequest& request = *chunk.request;
    if (request.state != TrtState::Complete) {
      request.position += request.chunk;
      request.chunk = 0;
    }
    if (request.left() > 0) continue;
    request.state = settings_.overlap && request.ends_with_next() ? TrtState::ToComplete : TrtState::Generation;
  }
}

void TrtExecutor::sample(const TrtBatch& batch) {
  const auto add_token = [this](TrtRequest& request) {
    if (request.state == TrtState::Complete) return;
    ++request.generated;
    ++request.outputs;
    log_.sampled.push_back(request.id);
    const bool stops = request.eos_at > 0 && request.outputs >= request.eos_at;
    if (stops || request.generated >= request.max_new || request.length() >= length_limit_) {
      request.state = TrtState::Complete;
    }
  };
  for (const TrtBatch::Chunk& chunk : batch.contexts) {
    if (chunk.is_last) add_token(*chunk.request);
  }
  for (TrtRequest* const request : batch.generation) add_token(*request);
}

void TrtExecutor::commit_contexts() {
  const bool all = settings_.reuse_policy == TrtReusePolicy::AllReusable;
  for (const TrtBatch::Chunk& chunk : batch_.contexts) {
    TrtRequest& request = *chunk.request;
    if (!request.has_active_cache()) continue;
    TrtSequence& cache = *request.cache;
    const bool is_end = request.left() == 0;
    if ((!settings_.enable_block_reuse || !all) && !cache.resize({}, request.position)) {
      throw Error(ErrorKind::CapacityExhausted, "request ", request.id, ": its history cannot be moved");
    }
    committing_ = &request;
    if (settings_.enable_block_reuse && (all || is_end)) {
      cache.commit(request.position);
      if (is_end) cache.stop_committing();
    }
    if (is_end) cache.stop_scratch();
    committing_ = nullptr;
  }
}

// Answers a batch: cancellations take effect, and finished requests leave.
void TrtExecutor::answer(const TrtBatch& batch) {
  log_.processed = true;
  apply_cancels();
  std::vector<TrtRequest*> finished;
  for (TrtRequest* const request : active_) {
    log_.answered.push_back(request->id);
    if (request->state == TrtState::Complete) finished.push_back(request);
  }
  std::erase_if(active_, [](const TrtRequest* request) { return request->state == TrtState::Complete; });
  for (TrtRequest* const request : finished) {
    free_cache(*request);
    log_.finished.push_back(request->id);
  }
  for (TrtRequest* const request : batch.generation) {
    if (!request->has_active_cache()) continue;
    const bool keeps = request->state == TrtState::Complete || request->state == TrtState::Context;
    const std::optional<std::uint32_t> capacity = keeps ? std::nullopt : std::optional(request->cache->capacity());
    if (!request->cache->resize(capacity, request->length() - 1)) {
      throw Error(ErrorKind::CapacityExhausted, "request ", request->id, ": its history cannot be moved");
    }
  }
}

void TrtExecutor::apply_cancels() {
  if (cancelled_.empty()) return;
  const std::unordered_set<RequestId> named(cancelled_.begin(), cancelled_.end());
  cancelled_.clear();
  const auto is_named = [&](const TrtRequest* request) { return named.contains(request->id); };
  for (const TrtRequest* const request : waiting_) {
    if (is_named(request)) log_.dropped.push_back(request->id);
  }
  std::erase_if(waiting_, is_named);
  for (TrtRequest* const request : active_) {
    if (!is_named(request)) continue;
    request->state = TrtState::Complete;
    request->cancelled = true;
  }
}

void TrtExecutor::check() const {
  if (dead_) return;
  store_.check();
  tree_.check();
  for (const TrtRequest* const request : active_) {
    if (request->cache != nullptr) request->cache->check();
  }
}

}  // namespace understudy
