// States of recurrent layers: slots of requests, and which of them the tree gets.
#include <algorithm>

#include "base/errors.hpp"
#include "engine/sglang/scheduler.hpp"

namespace understudy {

void SglangScheduler::take_state_slots(std::int64_t slots) {
  if (states_->free() < slots) {
    throw Error(ErrorKind::CapacityExhausted, "mamba_slots: a batch needs ", slots, " state slots and ",
                states_->free(), " are free, where SGLang exits; raise it, or lower max_running_requests");
  }
  states_->take(slots);
}

void SglangScheduler::evict_states(std::int64_t slots) {
  if (has_cache()) avail_ += static_cast<std::int64_t>(states_->make_room(slots));
}

// A request computes on in a copy of the cached state.
void SglangScheduler::copy_state(SglangRequest& request, RadixNode& from) {
  if (request.has_state) return;
  RadixLock lock = tree_.acquire(&from);
  evict_states(1);
  tree_.release(lock);
  take_state_slots(1);
  request.has_state = true;
}

// The request was not admitted after all.
void SglangScheduler::return_copy(SglangRequest& request) {
  states_->give_back(request.has_state ? 1 : 0);
  request.has_state = false;
}

void SglangScheduler::take_states(const SglangBatch& batch) {
  std::int64_t per_request = 0;
  if (settings_.mamba_extra_buffer) per_request = tracks_lazily() || !settings_.overlap ? 1 : 2;
  const auto missing = [&](const SglangRequest& request) {
    return (request.has_state ? 0 : 1) + (request.tracking_slots == 0 ? per_request : 0);
  };
  std::int64_t needed = 0;
  for (const SglangBatch::Row& row : batch.rows) needed += missing(*row.request);
  evict_states(needed);
  take_state_slots(needed);
  for (const SglangBatch::Row& row : batch.rows) {
    row.request->has_state = true;
    if (row.request->tracking_slots > 0) continue;
    row.request->tracking_slots = static_cast<std::uint8_t>(per_request);
    row.request->tracked_before = 0;
  }
}

// A prefill tracks the last state on the grid, or one where another prompt branches off.
void SglangScheduler::track_prefills(const SglangBatch& batch) {
  if (!tracks_states()) return;
  const std::uint32_t grid = settings_.state_grid();
  for (const SglangBatch::Row& row : batch.rows) {
    SglangRequest& request = *row.request;
    if (row.tokens < grid) continue;
    std::uint32_t tracked = request.prefix + row.tokens / grid * grid;
    const std::uint32_t computed =
        request.prefix + row.tokens / SglangSettings::kStateChunk * SglangSettings::kStateChunk;
    const std::uint32_t end = computed == tracked ? request.end : tracked + 1;
    const bool has_branch = request.prefix < request.branch && request.branch < end;
    if (has_branch && (request.branch - request.prefix) % settings_.state_chunk() == 0) tracked = request.branch;
    request.tracked = tracked;
  }
}

// Lazily: a request that reaches the grid takes its second slot for the time of one step.
void SglangScheduler::track_decodes() {
  if (!tracks_lazily()) return;
  for (SglangRequest* const request : running_) {
    if (request->kv % settings_.track_grid() != 0 || request->tracking_slots > 1) continue;
    if (states_->free() > 0) {
      states_->take(1);
      ++request->tracking_slots;
    } else {
      request->tracked = 0;
    }
  }
}

// A mixed step tracks no states.
void SglangScheduler::undo_tracking() {
  if (!tracks_lazily()) return;
  for (SglangRequest* const request : running_) {
    if (request->kv % settings_.track_grid() != 0) continue;
    request->untracked_kv = request->kv;
    return_second_slot(*request);
  }
}

void SglangScheduler::return_second_slot(SglangRequest& request) {
  if (request.tracking_slots < 2) return;
  states_->give_back(1);
  request.tracking_slots = 1;
}

// Before the output of a decode step is appended.
void SglangScheduler::track_result(const SglangBatch::Row& row) {
  if (!tracks_states()) return;
  SglangRequest& request = *row.request;
  const std::uint32_t grid = settings_.track_grid();
  if (tracks_lazily()) {
    // The state of the row in flight behind it would replace the one that belongs to its tokens.
    const bool overwrites = request.kv == row.kv + 1 && request.kv % grid == 0 && request.tracking_slots == 1 &&
                            request.untracked_kv != request.kv;
    if (overwrites && ends_with_next_output(request)) request.caches_end = false;
  }
  if (row.kv % grid != 0) return;
  if (tracks_lazily()) {
    return_second_slot(request);
  } else {
    request.tracked_before = request.tracked;
  }
  request.tracked = row.kv;
}

// Inserts tokens up to a state that the request has, and offers that state to the tree.
void SglangScheduler::checkpoint_state(SglangRequest& request, std::uint32_t tokens, bool ends) {
  std::uint32_t end = tokens;
  if (tracks_states()) {
    end = request.tracked;
    if (end > tokens) {
      const std::uint32_t before = settings_.overlap && !tracks_lazily() ? request.tracked_before : 0;
      end = !ends ? tokens : before <= tokens ? before : 0;
    }
  }
  const bool copies = !ends && end > 0;  // the request computes on
  if (copies) {
    if (states_->free() < 1 && tracks_lazily()) states_->unlock_early(request.lock);
    evict_states(1);
    take_state_slots(1);
  }
  const bool took = end > 0 && insert(request, end).took_part;
  if (copies && !took) states_->give_back(1);
  if (ends) {
    if (took) states_->take(1);  // one of the slots that the request gives back
    drop_states(request);
  }
  request.tracked = request.tracked_before = 0;
}

void SglangScheduler::drop_states(SglangRequest& request) {
  states_->give_back((request.has_state ? 1 : 0) + request.tracking_slots);
  request.has_state = false;
  request.tracking_slots = 0;
  request.tracked = request.tracked_before = 0;
}

}  // namespace understudy
