// KVCacheV2Scheduler: generation first, in the order of activation, then prompts.
#include <algorithm>

#include "engine/trtllm/executor.hpp"

namespace understudy {

bool TrtExecutor::schedule() {
  fetch();
  batch_ = {};
  recomputed_.clear();
  if (!plan()) {
    dead_ = true;
    return false;
  }
  for (TrtRequest* const request : recomputed_) free_cache(*request);
  return true;
}

// Activates as many waiting requests as a batch may have.
void TrtExecutor::fetch() {
  if (!admitting_) return;
  const std::size_t room = settings_.max_batch_size - std::min<std::size_t>(settings_.max_batch_size, active_.size());
  const std::size_t count = std::min(room, waiting_.size());
  for (std::size_t i = 0; i < count; ++i) {
    active_.push_back(waiting_[i]);
    log_.activated.push_back(waiting_[i]->id);
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
}

bool TrtExecutor::plan() {
  Pass pass;
  pass.order = active_;
  pass.end = pass.frontier = active_.size();
  pass.victims.assign(active_.size(), false);
  const std::vector<TrtRequest*> aside = schedule_generation(pass);
  schedule_contexts(pass, aside);
  recomputed_ = pass.recomputed;
  if (batch_.empty() && pass.suspended.empty() && pass.recomputed.empty()) {
    const auto waits = [](const TrtRequest* request) { return request->state == TrtState::Generation; };
    stuck_ = static_cast<std::size_t>(std::ranges::count_if(active_, waits));
    if (stuck_ > 0) return false;
  }
  // Requests of an adapter are together in a batch; those without one come first.
  std::ranges::stable_sort(batch_.contexts, {}, [](const TrtBatch::Chunk& chunk) {
    return std::pair(chunk.is_last, chunk.request->scope.adapter);
  });
  std::ranges::stable_sort(batch_.generation, {}, [](const TrtRequest* one) { return one->scope.adapter; });
  wait_for_batch();
  return true;
}

// ── Generation ──

// Returns the prompts that were passed on the way.
std::vector<TrtRequest*> TrtExecutor::schedule_generation(Pass& pass) {
  std::vector<TrtRequest*> aside;
  for (std::size_t at = 0; at < pass.end; ++at) {
    TrtRequest& request = *pass.order[at];
    if (pass.victims[at]) continue;
    if (batch_.generation.size() >= settings_.max_batch_size) break;
    if (request.state == TrtState::Context) aside.push_back(&request);
    if (request.state != TrtState::Generation) continue;
    if (pass.tokens + 1 > settings_.max_num_tokens) break;
    if (!allocate(request) && !suspend_others(pass, at) && !recompute_others(pass, at)) {
      if (request.has_active_cache()) suspend(pass, request);
      break;
    }
    batch_.generation.push_back(&request);
    ++pass.tokens;
  }
  return aside;
}

bool TrtExecutor::allocate(TrtRequest& request) {
  TrtSequence* const cache = request.cache.get();
  if (cache == nullptr || (!cache->active() && !cache->resume())) return false;
  return cache->resize(cache->capacity() + 1);
}

void TrtExecutor::suspend(Pass& pass, TrtRequest& request) {
  request.cache->suspend();
  pass.suspended.push_back(&request);
  log_.suspended.push_back(request.id);
}

// Suspends requests from the last until one more token of the request at a place fits.
bool TrtExecutor::suspend_others(Pass& pass, std::size_t at) {
  for (std::size_t victim = pass.end; victim-- > at + 1;) {
    TrtRequest& other = *pass.order[victim];
    if (!other.has_started() || !other.has_active_cache()) continue;
    suspend(pass, other);
    pass.end = victim;
    if (allocate(*pass.order[at])) return true;
  }
  return false;
}

std::optional<std::size_t> TrtExecutor::find_victim(const Pass& pass, std::size_t at) const {
  const auto may_pause = [](const TrtRequest& one) { return one.state != TrtState::ToComplete && one.has_started(); };
  const bool has_lower = store_.has_lower_level();
  for (std::size_t i = pass.frontier; i-- > at + 1;) {
    TrtRequest* const one = pass.order[i];
    const bool was_suspended = std::ranges::find(pass.suspended, one) != pass.suspended.end();
    if (!pass.victims[i] && (has_lower || !was_suspended) && may_pause(*one)) return i;
  }
  if (!has_lower) return std::nullopt;
  const auto found = std::ranges::find_if(pass.suspended, [&](const TrtRequest* one) { return may_pause(*one); });
  if (found == pass.suspended.end()) return std::nullopt;
  return static_cast<std::size_t>(std::ranges::find(pass.order, *found) - pass.order.begin());
}

// Frees requests, which are computed again later, until one more token fits.
bool TrtExecutor::recompute_others(Pass& pass, std::size_t at) {
  if (!settings_.enable_recompute_pause) return false;
  while (const std::optional<std::size_t> victim = find_victim(pass, at)) {
    TrtRequest& other = *pass.order[*victim];
    std::erase(pass.suspended, &other);
    log_.recomputed.push_back(other.id);
    free_cache(other);
    pass.recomputed.push_back(&other);
    pass.victims[*victim] = true;
    pass.frontier = std::min(pass.frontier, *victim);
    if (allocate(*pass.order[at])) return true;
    if (store_.has_lower_level() && suspend_others(pass, at)) return true;
  }
  return false;
}

// ── Prompts ──

void TrtExecutor::schedule_contexts(Pass& pass, const std::vector<TrtRequest*>& aside) {
  for (TrtRequest* const request : aside) {
    if (batch_.generation.size() + batch_.contexts.size() >= settings_.max_batch_size) break;
    const Step step =
        settings_.enable_chunked_prefill ? take_chunk(*request, pass.tokens) : take_whole(*request, pass.tokens);
    if (step == Step::Stop) break;
    if (step == Step::Skip) continue;
    batch_.contexts.push_back({request, request->position, request->chunk, request->chunk == request->left()});
  }
}

TrtExecutor::Step TrtExecutor::take_whole(TrtRequest& request, std::uint32_t& used) {
  const bool aware = settings_.enable_prefix_aware_scheduling;
  const std::uint32_t before = request.left();
  if (!aware && used + before > settings_.max_num_tokens) return Step::Stop;
  if (!prepare(request)) return Step::Stop;
  const std::uint32_t tokens = aware ? request.left() : before;
  if (used + tokens > settings_.max_num_tokens) return Step::Stop;
  request.chunk = request.left();
  if (!grow_context(request, request.left())) return Step::Skip;
  used += tokens;
  return Step::Scheduled;
}

TrtExecutor::Step TrtExecutor::take_chunk(TrtRequest& request, std::uint32_t& used) {
  const std::uint32_t rest = settings_.max_num_tokens - used;
  const std::uint32_t before = request.left();
  if (rest == 0 || rest < chunk_unit_ || !prepare(request)) return Step::Skip;
  const std::uint32_t wanted = settings_.enable_prefix_aware_scheduling ? request.left() : before;
  std::uint32_t tokens = std::min(rest, wanted);
  if (tokens < wanted) tokens = tokens / chunk_unit_ * chunk_unit_;
  if (tokens == 0) return Step::Skip;
  request.chunk = std::min(tokens, request.left());
  if (!grow_context(request, request.chunk)) return Step::Skip;
  used += tokens;
  return Step::Scheduled;
}

// Gives a request its cache, with what is found for its prompt, and brings it to the device.
bool TrtExecutor::prepare(TrtRequest& request) {
  if (request.in_first_chunk()) {
    const bool reuse = settings_.enable_block_reuse;
    if (request.cache == nullptr) {
      request.cache = std::make_unique<TrtSequence>(store_, tree_, settings_.reuse(), request.scope, request.tokens,
                                                    reuse ? request.prompt - 1 : 0);
      request.cache_number = ++caches_;
      log_.matched.push_back({request.id, request.cache->committed(), request.prompt});
    }
    if (reuse) {
      request.position = request.reused = request.cache->committed();
    } else {
      request.cache->stop_committing();
    }
  }
  return request.cache->active() || request.cache->resume();
}

bool TrtExecutor::grow_context(TrtRequest& request, std::uint32_t tokens) {
  if (request.cache->resize(std::max(request.cache->capacity(), request.position + tokens))) return true;
  if (request.in_first_chunk()) request.cache->suspend();
  return false;
}

// Holds prompts back, to compute more of them in one batch.
void TrtExecutor::wait_for_batch() {
  const std::uint32_t most = settings_.batch_wait_timeout_iters;
  const double ratio = settings_.batch_wait_max_tokens_ratio;
  if ((most == 0 && ratio <= 0) || batch_.contexts.empty() || batch_.generation.empty()) return;
  std::size_t tokens = batch_.generation.size();
  for (const TrtBatch::Chunk& chunk : batch_.contexts) tokens += chunk.tokens;
  if (waited_ < most && static_cast<double>(tokens) < ratio * settings_.max_num_tokens) {
    ++waited_;
    batch_.contexts.clear();
  } else {
    waited_ = 0;
  }
}

}  // namespace understudy
