// Results of a batch: outputs, ends, and what goes into the tree.
#include <algorithm>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangScheduler::process(const SglangBatch& batch) {
  for (const SglangBatch::Row& row : batch.rows) {
    SglangRequest& request = *row.request;
    if (request.withdrawn) continue;
    const bool prefill = batch.mode != SglangMode::Decode;
    if (request.finished && (!prefill || request.chunks == 0)) continue;
    if (prefill && request.chunks > 0) {
      --request.chunks;
      continue;
    }
    log_.sampled.push_back(request.id);
    if (append_output(request)) {
      release(request, true);
    } else if (prefill && !row.decodes) {
      keep(request);
    }
  }
  if (host_) host_->submit_writes();
}

// Appends the next output; true: the request has ended.
bool SglangScheduler::append_output(SglangRequest& request) {
  const std::uint32_t number = request.outputs() + 1;
  const bool eos = request.eos_at == number;
  // A given output keeps its identity: a prompt may quote it, also where it ends the request.
  const std::uint64_t own = eos ? kEos : request.first_output + number - 1;
  const std::uint64_t token = number <= request.given_outputs.size() ? request.given_outputs.at(number - 1) : own;
  request.tokens.append({token, 1});
  const bool ends = request.to_abort || (eos && !settings_.ignore_eos) || request.outputs() >= request.max_new;
  if (!ends) return false;
  request.finished = true;
  log_.finished.push_back(request.id);
  if (request.to_abort) log_.aborted.push_back(request.id);
  return true;
}

// Inserts the first tokens into the tree, and locks where they end.
void SglangScheduler::checkpoint(SglangRequest& request, std::uint32_t tokens) {
  inserting_ = &request;
  const auto whole = static_cast<std::uint32_t>(down(tokens));
  const RadixInsert first = tree_.insert(request.tokens, whole, request.own, request.inserted);
  avail_ += first.duplicates;
  request.inserted = std::max(request.inserted, whole);
  const auto prompt = static_cast<std::uint32_t>(down(request.prompt_tokens));
  if (prompt > 0 && prompt < whole) {  // parts the leaf at the end of the prompt
    (void)tree_.insert(request.tokens, prompt, prompt, prompt, false);
  }
  if (request.node != nullptr) tree_.unlock(request.node);
  tree_.lock(first.node);
  request.node = first.node;
  request.own = whole;
  inserting_ = nullptr;
}

void SglangScheduler::keep(SglangRequest& request) {
  if (has_cache()) checkpoint(request, request.end);
  request.prefix = request.end;
}

void SglangScheduler::release(SglangRequest& request, bool inserts) {
  if (inserts && has_cache()) checkpoint(request, request.kv);
  avail_ += up(request.kv) - request.own;
  if (request.node != nullptr) tree_.unlock(request.node);
  request.node = nullptr;
  if (request.has_slot) ++free_slots_;
  request.has_slot = false;
}

}  // namespace understudy
