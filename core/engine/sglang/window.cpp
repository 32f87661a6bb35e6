// Sliding windows in the schedule: the second budget of an admission, and KV that windows have passed.
#include <algorithm>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

std::int64_t SglangScheduler::left_window(const Budget& budget) const {
  const std::uint64_t evictable = has_cache() ? window_->evictable() : 0;
  return window_->free() + static_cast<std::int64_t>(evictable) - budget.window;
}

// Window KV that a request needs at most: the piece being computed beyond a window, a window, and a page.
std::int64_t SglangScheduler::window_need(std::int64_t tokens, std::int64_t outputs,
                                          std::optional<std::int64_t> chunk) const {
  const std::int64_t window = window_->window();
  const std::int64_t piece = chunk ? std::min(tokens, *chunk) : tokens;
  return std::max<std::int64_t>(piece - window, 0) + std::min(tokens + outputs, window) + page();
}

// The budget of chunks, or what the window pool leaves of it for a prompt larger than the pool; nothing: no chunk.
std::optional<std::int64_t> SglangScheduler::chunk_within_window(std::int64_t extent, std::int64_t outputs,
                                                                 const Budget& budget, bool& fits) const {
  fits = true;
  const std::int64_t left = left_window(budget);
  const std::int64_t need = window_need(up(extent), outputs, budget.chunk);
  if (need < left) return budget.chunk;
  const std::int64_t most = down(std::max<std::int64_t>(left - window_need(0, outputs, std::nullopt), 0));
  fits = budget.chunk && most > 0 && need >= static_cast<std::int64_t>(window_->size());
  return budget.chunk ? std::optional(std::min(*budget.chunk, most)) : std::nullopt;
}

// Gives back window KV that lies before the window of a token, in whole pages, and not what the tree owns.
void SglangScheduler::slide(SglangRequest& request, std::int64_t token) {
  const std::int64_t window = window_->window();
  if (token - window < std::int64_t{request.window_begin} + 1) return;
  const std::int64_t from = std::max(request.window_begin, request.own);
  const std::int64_t kept = has_cache() ? up(std::max<std::int64_t>(window, page())) : window;
  const std::int64_t to = std::max(from, down(std::max(from, token - kept)));
  window_->give_back(to - from);
  request.window_begin = static_cast<std::uint32_t>(to);
}

// Without a cache no checkpoint slides: each piece does, with overlap only past pieces whose results are known.
void SglangScheduler::slide_prefills(const SglangBatch& batch) {
  if (has_cache()) return;
  const std::int64_t behind = settings_.overlap ? std::max<std::int64_t>(settings_.chunked_prefill_size, 0) : 0;
  for (const SglangBatch::Row& row : batch.rows) slide(*row.request, std::int64_t{row.request->prefix} - behind);
}

void SglangScheduler::slide_decodes() {
  const std::int64_t window = window_->window();
  for (SglangRequest* const request : running_) {
    const std::int64_t last = std::int64_t{request->size()} - 1;
    const bool due = last - window >= std::int64_t{request->window_begin} + settings_.swa_eviction_interval;
    if (request->decodes() >= 1 && due) slide(*request, last);
    if (has_cache() && settings_.release_prefill_swa && request->decodes() >= window) {
      window_->unlock_early(request->lock);
    }
  }
}

}  // namespace understudy
