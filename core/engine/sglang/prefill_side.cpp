// The prefill side of a disaggregated server: prompts are computed and sent, no request decodes.
#include <algorithm>
#include <utility>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangScheduler::end_on_side(SglangRequest* request, bool failed) {
  request->finished = true;
  log_.finished.push_back(request->id);
  if (failed) log_.aborted.push_back(request->id);
}

void SglangScheduler::free_buffer(SglangRequest& request) {
  if (request.has_buffer) ++side_.buffers;
  request.has_buffer = false;
}

// Requests whose decode side has memory for them, in order, as far as there are buffers.
void SglangScheduler::take_bootstrapped() {
  std::vector<SglangRequest*> left;
  for (SglangRequest* const request : side_.bootstrap) {
    const SglangTransferState state = transport_->poll(request->id);
    if (state == SglangTransferState::Failed) {
      end_on_side(request, true);
    } else if (state == SglangTransferState::Ready && side_.buffers > 0) {
      request->has_buffer = true;
      --side_.buffers;
      request->sent = transport_->decode_prefix(request->id);
      request->entered = ++entries_;
      waiting_.push_back(request);
    } else {
      left.push_back(request);
    }
  }
  side_.bootstrap = std::move(left);
}

// Sends whole pages up to `end`; the last send also part of one.
void SglangScheduler::send(SglangRequest& request, std::uint32_t end, bool last) {
  end = std::min(end, request.prompt_tokens);
  if (!last) end = static_cast<std::uint32_t>(down(end));
  if (end < request.sent) return;
  const auto pages = static_cast<std::uint32_t>(up(end - request.sent) / page());
  if (pages > 0 || last) transport_->send(request.id, pages, last);
  request.sent = end;
}

std::unique_ptr<SglangBatch> SglangScheduler::next_prefill_batch() {
  take_bootstrapped();
  if (chunked_ != nullptr && chunk_aborted_) {
    SglangRequest& request = *std::exchange(chunked_, nullptr);
    free_buffer(request);
    release(request, false);
    transport_->fail(request.id);
    report_abort(&request);
  }
  chunk_aborted_ = false;
  full_ = false;
  std::erase_if(waiting_, [this](SglangRequest* request) {
    if (transport_->poll(request->id) != SglangTransferState::Failed) return false;
    free_buffer(*request);
    end_on_side(request, true);
    return true;
  });
  if (chunked_ != nullptr) {
    keep(*chunked_);
    chunked_->computed = chunked_->end;
    if (!settings_.overlap) send(*chunked_, chunked_->end, false);
  }
  last_.reset();
  std::unique_ptr<SglangBatch> batch = form_prefill();
  if (batch && settings_.side.early_send) {
    for (const SglangBatch::Row& row : batch->rows) {
      SglangRequest& request = *row.request;
      if (request.prefix > request.sent && request.prefix % page() == 0) send(request, request.prefix, false);
    }
  }
  return batch;
}

void SglangScheduler::process_prefill_side(const SglangBatch& batch) {
  std::vector<SglangRequest*> aborted;
  for (const SglangBatch::Row& row : batch.rows) {
    SglangRequest& request = *row.request;
    if (request.chunks > 0) {
      --request.chunks;
      if (!request.finished && !request.to_abort && settings_.overlap) send(request, request.computed, false);
      continue;
    }
    if (request.finished) continue;
    if (request.to_abort) {
      transport_->fail(request.id);
      free_buffer(request);
      release(request, false);
      request.finished = true;
      aborted.push_back(&request);
      continue;
    }
    log_.sampled.push_back(request.id);
    append_token(request);
    keep(request);
    side_.moving.push_back(&request);
    send(request, request.prompt_tokens, true);
    transport_->end_sends(request.id);
  }
  for (SglangRequest* const request : aborted) end_on_side(request, true);
}

// Requests whose KV has arrived, or will not: both stay cached here.
void SglangScheduler::take_arrived() {
  std::vector<std::pair<SglangRequest*, bool>> ended;
  std::erase_if(side_.moving, [&](SglangRequest* request) {
    const SglangTransferState state = transport_->poll(request->id);
    if (state != SglangTransferState::Done && state != SglangTransferState::Failed) return false;
    release(*request, true);
    ended.emplace_back(request, state == SglangTransferState::Failed);
    return true;
  });
  for (const auto& [request, failed] : ended) {
    end_on_side(request, failed);
    free_buffer(*request);
  }
}

}  // namespace understudy
