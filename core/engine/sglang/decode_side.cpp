// The decode side of a disaggregated server: memory is allocated for prompts that another server computes.
#include <algorithm>
#include <utility>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

std::uint64_t SglangScheduler::backup_tokens(const SglangRequest& request) const {
  return static_cast<std::uint64_t>(up(std::int64_t{request.size()} - 1));
}

// Takes host memory for a request's KV; false: there is none, or no copies are made.
bool SglangScheduler::back_up(const SglangRequest& request) {
  if (!settings_.side.backs_up_retracted) return false;
  if (!settings_.side.host_tokens) return true;
  const std::uint64_t tokens = backup_tokens(request);
  if (side_.host_tokens < tokens) return false;
  side_.host_tokens -= tokens;
  return true;
}

void SglangScheduler::drop_backup(const SglangRequest& request) {
  if (settings_.side.host_tokens) side_.host_tokens += backup_tokens(request);
}

// Tokens to allocate now: free and evictable ones, less those reserved for `more` and for all requests that have
// memory, or for the running request that needs the most if the others were retracted.
std::int64_t SglangScheduler::decode_budget(std::optional<std::int64_t> retractable, std::size_t more) const {
  const auto active = static_cast<std::int64_t>(running_.size() + side_.moving.size() + waiting_.size() + more);
  std::int64_t reserved = std::int64_t{settings_.side.num_reserved_decode_tokens} * active;
  if (retractable) {
    for (const SglangRequest* const one : running_) {
      reserved = std::max(reserved, clipped(one->max_new) + one->prompt_tokens - *retractable);
    }
  }
  return avail_ + evictable() - reserved;
}

void SglangScheduler::preallocate(SglangRequest& request, std::uint32_t prefix) {
  const std::uint32_t filled = request.prompt_tokens + (request.outputs() > 0 ? request.outputs() - 1 : 0);
  const std::int64_t tokens = up(filled) - up(prefix);
  --free_slots_;
  request.has_slot = true;
  make_room(tokens);
  take_tokens(tokens, "an allocation for a transfer needs ");
  request.kv = request.end = filled;
  request.prefix = request.own = prefix;
}

void SglangScheduler::poll_decode_side() {
  std::erase_if(side_.held, [this](SglangRequest* request) {
    if (!transport_->is_drained(request->id)) return false;
    release(*request, false);
    free_buffer(*request);
    return true;
  });
  resume_retracted();
  has_polled_ = false;
  // Retracted requests go first: nothing else is looked at while one waits.
  if (!side_.retracted.empty()) return;
  side_.polls = (side_.polls + 1) % settings_.side.polling_interval;
  if (side_.polls != 0) return;
  has_polled_ = true;
  allocate_for_transfers();
  take_transferred();
}

void SglangScheduler::resume_retracted() {
  std::vector<SglangRequest*> resumed;
  for (SglangRequest* const request : side_.retracted) {
    const std::int64_t filled = request->prompt_tokens + (request->outputs() > 0 ? request->outputs() - 1 : 0);
    const std::int64_t needed = up(filled) + settings_.side.num_reserved_decode_tokens;
    if (free_slots_ == 0 || needed > decode_budget(std::nullopt, resumed.size())) break;
    drop_backup(*request);
    preallocate(*request, 0);
    request->withdrawn = false;
    if (has_cache()) request->lock = tree_.acquire(tree_.root());
    resumed.push_back(request);
    log_.resumed.push_back(request->id);
  }
  side_.retracted.erase(side_.retracted.begin(), side_.retracted.begin() + static_cast<std::ptrdiff_t>(resumed.size()));
  waiting_.insert(waiting_.end(), resumed.begin(), resumed.end());
}

// In order; the first request that does not fit stops all behind it.
void SglangScheduler::allocate_for_transfers() {
  std::vector<SglangRequest*> failed;
  for (SglangRequest* const request : side_.bootstrap) {
    const SglangTransferState state = transport_->poll(request->id);
    if (state == SglangTransferState::Ready) request->is_ready = true;
    if (state == SglangTransferState::Failed) request->finished = true;
  }
  std::int64_t retractable = 0;
  for (const SglangRequest* const one : running_) retractable += one->size();
  if (settings_.enable_priority_scheduling) {
    std::ranges::stable_sort(side_.bootstrap, {}, [this](const SglangRequest* one) { return one->priority * sign(); });
  }
  std::erase_if(side_.bootstrap, [this](SglangRequest* request) {
    if (request->finished) end_on_side(request, true);
    return request->finished;
  });
  std::vector<SglangRequest*> allocated;
  for (SglangRequest* const request : side_.bootstrap) {
    if (!request->is_ready) continue;
    if (side_.buffers == 0 || free_slots_ == 0) break;
    std::uint32_t prefix = 0;
    if (has_cache()) {
      const RadixMatch match = tree_.match(request->tokens, request->prompt_tokens);
      prefix = match.tokens;
      request->lock = tree_.acquire(match.node);
    }
    const std::int64_t length = request->prompt_tokens;
    const std::int64_t pages = up(length) - up(prefix);
    const std::int64_t needed = std::max(pages + settings_.side.num_reserved_decode_tokens,
                                         length - prefix + clipped(request->max_new) - retractable);
    if (needed > decode_budget(retractable, allocated.size())) {
      tree_.release(request->lock);
      break;
    }
    preallocate(*request, prefix);
    request->has_buffer = true;
    --side_.buffers;
    request->was_admitted = true;
    const auto moved = static_cast<std::uint32_t>((length - prefix + page() - 1) / page());
    log_.allocated.push_back({request->id, moved, prefix});
    allocated.push_back(request);
    transport_->request_pages(request->id, moved, prefix);
  }
  std::erase_if(side_.bootstrap, [](const SglangRequest* request) { return request->has_buffer; });
  side_.moving.insert(side_.moving.end(), allocated.begin(), allocated.end());
}

void SglangScheduler::take_transferred() {
  std::vector<SglangRequest*> left;
  std::vector<SglangRequest*> failed;
  for (SglangRequest* const request : side_.moving) {
    const SglangTransferState state = transport_->poll(request->id);
    if (state == SglangTransferState::Failed) {
      end_on_side(request, true);
      transport_->report_failure(request->id);
      failed.push_back(request);
    } else if (state == SglangTransferState::Done) {
      append_token(*request);
      request->entered = ++entries_;
      free_buffer(*request);
      waiting_.push_back(request);
      log_.arrived.push_back(request->id);
    } else {
      left.push_back(request);
    }
  }
  side_.moving = std::move(left);
  for (SglangRequest* const request : failed) {
    if (transport_->waits_for_drain()) {
      side_.held.push_back(request);
    } else {
      release(*request, false);
      free_buffer(*request);
    }
  }
}

// Requests whose KV is here join the running ones; some have ended with the output of the prefill side.
void SglangScheduler::join_arrived() {
  if (settings_.enable_priority_scheduling && settings_.schedule_policy == SglangPolicy::Lof) {
    std::ranges::stable_sort(waiting_, {}, [this](const SglangRequest* one) {
      return std::pair(one->priority * sign(), -static_cast<std::int64_t>(one->max_new));
    });
  } else if (settings_.enable_priority_scheduling) {
    std::ranges::stable_sort(
        waiting_, {}, [this](const SglangRequest* one) { return std::pair(one->priority * sign(), one->entered); });
  }
  const std::size_t running = running_.size();
  const std::size_t places =
      settings_.max_running_requests - std::min<std::size_t>(settings_.max_running_requests, running);
  const std::size_t count = std::min(places, waiting_.size());
  const std::vector<SglangRequest*> joined(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  for (SglangRequest* const request : joined) {
    keep(*request);
    log_.joined.push_back(request->id);
    if (!request->was_joined) log_.sampled.push_back(request->id);
    request->was_joined = true;
  }
  for (SglangRequest* const request : joined) {
    if (has_ended(*request)) {
      release(*request, true);
      end_on_side(request, request->to_abort);
    } else {
      running_.push_back(request);
    }
  }
}

std::unique_ptr<SglangBatch> SglangScheduler::next_decode_batch() {
  poll_decode_side();
  join_arrived();
  last_.reset();
  return running_.empty() ? nullptr : form_decode();
}

}  // namespace understudy
