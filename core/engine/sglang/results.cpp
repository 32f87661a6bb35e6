// Results of a batch: outputs, ends, and what goes into the tree.
#include <algorithm>

#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangScheduler::process(const SglangBatch& batch) {
  if (settings_.side.role == SglangRole::Prefill) return process_prefill_side(batch);
  for (const SglangBatch::Row& row : batch.rows) {
    SglangRequest& request = *row.request;
    if (request.withdrawn) continue;
    const bool prefill = batch.mode != SglangMode::Decode;
    if (request.finished && (!prefill || request.chunks == 0)) continue;
    if (prefill && request.chunks > 0) {
      --request.chunks;
      continue;
    }
    if (states_ && !prefill) track_result(row);
    log_.sampled.push_back(request.id);
    if (append_output(request)) {
      release(request, true);
    } else if (prefill && !row.decodes) {
      keep(request);
    }
  }
  if (host_) host_->submit_writes();
}

bool SglangScheduler::ends_with_next_output(const SglangRequest& request) const {
  const std::uint32_t number = request.outputs() + 1;
  const bool eos = request.eos_at == number && !settings_.ignore_eos;
  return request.to_abort || eos || number >= request.max_new;
}

void SglangScheduler::append_token(SglangRequest& request) {
  const std::uint32_t number = request.outputs() + 1;
  // A given output keeps its identity: a prompt may quote it, also where it ends the request.
  const std::uint64_t own = request.eos_at == number ? kEos : request.first_output + number - 1;
  const std::uint64_t token = number <= request.given_outputs.size() ? request.given_outputs.at(number - 1) : own;
  request.tokens.append({token, 1});
}

// Whether the last output ends the request.
bool SglangScheduler::has_ended(const SglangRequest& request) const {
  const bool eos = request.eos_at > 0 && request.eos_at == request.outputs() && !settings_.ignore_eos;
  return request.to_abort || eos || request.outputs() >= request.max_new;
}

// Appends the next output; true: the request has ended.
bool SglangScheduler::append_output(SglangRequest& request) {
  append_token(request);
  if (!has_ended(request)) return false;
  request.finished = true;
  log_.finished.push_back(request.id);
  if (request.to_abort) log_.aborted.push_back(request.id);
  return true;
}

RadixInsert SglangScheduler::insert(SglangRequest& request, std::uint32_t tokens) {
  inserting_ = &request;
  RadixInsertion how;
  how.count = static_cast<std::uint32_t>(down(tokens));
  how.own = request.own;
  how.inserted = request.inserted;
  how.window_begin = request.window_begin;
  const RadixInsert out = tree_.insert(request.tokens, how);
  avail_ += out.duplicates;
  if (window_) window_->give_back(out.window_duplicates);
  request.inserted = std::max(request.inserted, how.count);
  const auto prompt = static_cast<std::uint32_t>(down(request.prompt_tokens));
  if (!window_ && !states_ && prompt > 0 && prompt < how.count) {  // parts the leaf at the end of the prompt
    (void)tree_.insert(request.tokens, {prompt, prompt, prompt, false});
  }
  tree_.release(request.lock);
  request.lock = tree_.acquire(out.node);
  request.own = how.count;
  inserting_ = nullptr;
  return out;
}

// Inserts the first tokens into the tree, and locks where they end; `ends`: the request is released next.
void SglangScheduler::checkpoint(SglangRequest& request, std::uint32_t tokens, bool ends) {
  if (states_) return checkpoint_state(request, tokens, ends);
  if (!window_) {
    (void)insert(request, tokens);
    return;
  }
  // A prefix that was cached without its window is cut where it ended, and gets one.
  const bool at_branch = request.own < request.branch && request.branch <= tokens;
  const std::uint32_t end = at_branch ? request.branch : tokens;
  if (!ends) slide(request, std::int64_t{end} - 1);
  if (end == 0) return;
  (void)insert(request, end);
  if (!at_branch || request.own < request.branch) return;
  request.branch = 0;
  if (!ends) slide(request, std::int64_t{request.end} - 1);
}

void SglangScheduler::keep(SglangRequest& request) {
  if (has_cache()) checkpoint(request, request.end, false);
  request.prefix = request.end;
}

void SglangScheduler::release(SglangRequest& request, bool inserts) {
  if (inserts && has_cache() && request.caches_end) checkpoint(request, request.kv, true);
  const std::int64_t held = up(request.kv);
  avail_ += held - request.own;
  if (window_)
    window_->give_back(held - std::max<std::int64_t>(request.own, std::min<std::int64_t>(request.window_begin, held)));
  tree_.release(request.lock);
  if (states_) drop_states(request);
  request.window_begin = 0;
  if (request.has_slot) ++free_slots_;
  request.has_slot = false;
}

}  // namespace understudy
