// Decode batches, and retraction where memory does not suffice.
#include <algorithm>
#include <limits>
#include <tuple>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangScheduler::make_room(std::int64_t tokens) {
  if (!has_cache()) return;
  if (host_) return host_->make_room(avail_, tokens);
  while (avail_ < tokens) {
    const std::uint32_t freed = tree_.evict();
    if (freed == 0) break;
    avail_ += freed;
  }
  if (window_) avail_ += static_cast<std::int64_t>(window_->make_room(tokens));
}

// Overlap: the outstanding result is the request's last by length.
bool SglangScheduler::finishing(const SglangRequest& request) const {
  return request.is_outstanding && request.outputs() + 1 >= request.max_new;
}

// Drops finished requests, and with overlap finishing ones. Returns whether any was dropped; `dropped`: finishing ones.
bool SglangScheduler::drop_finishing(bool& dropped) {
  const std::size_t before = running_.size();
  std::erase_if(running_, [](const SglangRequest* request) { return request->finished; });
  dropped = std::erase_if(running_, [this](const SglangRequest* request) { return finishing(*request); }) > 0;
  return running_.size() < before;
}

bool SglangScheduler::fits(std::int64_t& need) {
  const auto pages =
      std::ranges::count_if(running_, [this](const SglangRequest* one) { return one->kv % page() == 0; });
  need = pages * std::int64_t{page()};
  make_room(need);
  return free_tokens() >= need;
}

void SglangScheduler::allocate_decode(std::int64_t need) {
  if (window_) slide_decodes();
  make_room(static_cast<std::int64_t>(page()) * static_cast<std::int64_t>(running_.size()));
  take_tokens(need, "running requests decode and need ");
  for (SglangRequest* const request : running_) ++request->kv;
  if (states_) track_decodes();
}

void SglangScheduler::take_tokens(std::int64_t tokens, const char* what) {
  if (free_tokens() < tokens) {
    throw Error(ErrorKind::CapacityExhausted, "num_gpu_blocks: ", what, tokens, " tokens and ", free_tokens(),
                " are free, where SGLang exits; raise it, or lower max_num_seqs");
  }
  avail_ -= tokens;
  if (window_) window_->take(tokens);
}

std::unique_ptr<SglangBatch> SglangScheduler::form_decode() {
  bool dropped = false;
  bool fewer = drop_finishing(dropped);
  if (running_.empty()) {
    full_ = false;
    return nullptr;
  }
  std::int64_t need = 0;
  if (fits(need)) {
    ratio_ = std::max(ratio_ - ratio_step_, min_ratio_);
  } else if (dropped) {
    full_ = false;
    return nullptr;
  } else {
    retract();
    fewer = true;
    (void)fits(need);
  }
  if (fewer) full_ = false;
  if (running_.empty()) return nullptr;
  allocate_decode(need);
  auto batch = std::make_unique<SglangBatch>();
  batch->mode = SglangMode::Decode;
  for (SglangRequest* const request : running_) batch->rows.push_back({request, 1, true, request->kv});
  return batch;
}

// Takes requests with few outputs back to the queue until the others fit.
void SglangScheduler::retract() {
  std::ranges::stable_sort(running_, {}, [this](const SglangRequest* one) {
    const std::int64_t rank = settings_.retracts_by_priority ? one->priority * sign() : 0;
    return std::tuple(rank, -static_cast<std::int64_t>(one->outputs()), one->prompt_tokens);
  });
  std::vector<SglangRequest*> victims;
  std::vector<SglangRequest*> lost;
  const auto short_of_room = [this] {
    std::int64_t need = 0;
    return !fits(need);
  };
  bool first = true;
  while (running_.size() > 1 && (first || short_of_room())) {
    first = false;
    SglangRequest* const victim = running_.back();
    running_.pop_back();
    const bool is_kept = settings_.side.role != SglangRole::Decode || back_up(*victim);
    (is_kept ? victims : lost).push_back(victim);
    withdraw(victim);
    retracted_inputs_ += victim->prompt_tokens;
    retracted_outputs_ += victim->outputs();
    make_room(static_cast<std::int64_t>(running_.size()) * settings_.retract_decode_steps);
    if (is_kept) log_.retracted.push_back(victim->id);
  }
  if (running_.size() == 1 && short_of_room()) {  // it does not fit alone: the window pool is too small for it
    lost.push_back(running_.back());
    withdraw(running_.back());
    running_.pop_back();
  }
  double outputs = 0;
  double wanted = 0;
  for (const SglangRequest* const request : running_) {
    outputs += request->outputs() + static_cast<double>(settings_.retract_decode_steps);
    wanted += request->max_new;
  }
  ratio_ = std::min(1.0, outputs / (wanted + 1));
  for (SglangRequest* const request : lost) report_abort(request);
  for (SglangRequest* const victim : victims) {
    if (settings_.side.role == SglangRole::Decode) {
      victim->entered = ++entries_;
      side_.retracted.push_back(victim);
    } else {
      enqueue(victim);
    }
  }
}

void SglangScheduler::forget_cached() {
  if (has_cache()) make_room(std::numeric_limits<std::int64_t>::max());
}

void SglangScheduler::withdraw(SglangRequest* request) {
  release(*request, false);
  request->prefix = request->own = request->kv = request->inserted = request->end = 0;
  request->matched_prefix = 0;
  request->branch = request->untracked_kv = 0;
  request->caches_end = true;
  request->withdrawn = true;
}

}  // namespace understudy
