// An iteration's schedule: continue a chunk, take over the last batch, then prefill or decode.
#include <algorithm>
#include <utility>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

std::unique_ptr<SglangBatch> SglangScheduler::schedule() {
  if (out_of_memory_) {
    throw Error(ErrorKind::WrongState, "SGLang has run out of memory and exited; make a new engine, with more blocks");
  }
  try {
    std::unique_ptr<SglangBatch> batch;
    switch (settings_.side.role) {
      case SglangRole::Unified:
        batch = next_batch();
        break;
      case SglangRole::Prefill:
        batch = next_prefill_batch();
        break;
      case SglangRole::Decode:
        batch = next_decode_batch();
        break;
    }
    last_ = batch ? std::make_unique<SglangBatch>(*batch) : nullptr;
    seen_entries_ = entries_;
    return batch;
  } catch (...) {
    out_of_memory_ = true;
    throw;
  }
}

std::unique_ptr<SglangBatch> SglangScheduler::next_batch() {
  if (chunked_ != nullptr && chunk_aborted_) {
    SglangRequest& request = *std::exchange(chunked_, nullptr);
    release(request, false);
    report_abort(&request);
  }
  chunk_aborted_ = false;
  if (host_) host_->poll();
  if (chunked_ != nullptr && chunked_->end > chunked_->prefix) keep(*chunked_);
  take_over_last();
  last_.reset();
  drop_finished();
  std::unique_ptr<SglangBatch> batch;
  bool deferred = false;
  if (interval_left_ > 0) {
    if (running_.size() < settings_.prefill_decode_interval_min_bs) {
      interval_left_ = 0;
    } else {
      --interval_left_;
      deferred = true;
    }
  }
  if (!deferred) batch = form_prefill();
  if (batch) interval_left_ = settings_.prefill_decode_interval;
  if (!batch && !running_.empty() && !running_is_prefill_only_) batch = form_decode();
  return batch;
}

// Requests of the last prefill batch join the running ones.
void SglangScheduler::take_over_last() {
  if (!last_ || last_->mode == SglangMode::Decode) return;
  std::vector<SglangRequest*> left;
  for (const SglangBatch::Row& row : last_->rows) {
    SglangRequest* const request = row.request;
    if (request->finished || request == chunked_ || request == last_->unfinished) continue;
    left.push_back(request);
  }
  if (left.size() < last_->rows.size()) full_ = false;
  if (left.empty()) return;
  if (running_.empty()) full_ = false;
  const bool prefill_only = last_->mode == SglangMode::Extend && std::ranges::all_of(last_->rows, [](const auto& row) {
                              return row.request->prefill_only();
                            });
  running_is_prefill_only_ = prefill_only && (running_.empty() || running_is_prefill_only_);
  running_.insert(running_.end(), left.begin(), left.end());
}

void SglangScheduler::drop_finished() {
  if (std::erase_if(running_, [](const SglangRequest* request) { return request->finished; }) > 0) full_ = false;
}

void SglangScheduler::set_outstanding(const SglangBatch* batch) noexcept {
  const auto mark = [this](bool on) {
    for (const SglangBatch::Row& row : outstanding_->rows) {
      if (row.request != outstanding_->unfinished) row.request->is_outstanding = on;
    }
  };
  if (outstanding_ != nullptr) mark(false);
  outstanding_ = is_side() ? nullptr : batch;  // disaggregated servers do not predict ends
  if (outstanding_ != nullptr) mark(true);
}

void SglangScheduler::end_iteration(bool idle) {
  if (idle && is_idle()) ratio_ = init_ratio_;
  if (settings_.side.role == SglangRole::Prefill) take_arrived();
}

}  // namespace understudy
