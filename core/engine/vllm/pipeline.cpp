// Pipeline parallelism: the batch queue, and a step of an engine that has one.
#include "engine/vllm/pipeline.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "engine/vllm/engine.hpp"

namespace understudy {

bool Pipeline::computes() const noexcept {
  return std::ranges::any_of(queue_, [](const Flight& flight) { return !flight.batch.empty(); });
}

std::int64_t Pipeline::push(Batch batch, std::int64_t ready_ns) {
  UNDERSTUDY_ASSERT(!full(), "the engine waits for the oldest batch of a full queue");
  std::int64_t end_ns = queue_.empty() ? ready_ns : std::max(ready_ns, queue_.back().end_ns);
  if (!batch.empty()) {
    end_ns = ready_ns;
    for (std::size_t stage = 0; stage < free_ns_.size(); ++stage) {
      end_ns = std::max(end_ns, free_ns_[stage]) + durations_ns_[stage];
      free_ns_[stage] = end_ns;
    }
  }
  queue_.push_back({std::move(batch), end_ns});
  return end_ns;
}

Pipeline::Flight Pipeline::pop() {
  Flight oldest = std::move(queue_.front());
  queue_.pop_front();
  return oldest;
}

// Schedule until the queue is full, then wait for its oldest batch, like vLLM's loop. An empty one takes no time.
void VllmEngine::begin_pipelined_step(std::int64_t now_ns) {
  sync_to(now_ns);
  for (std::size_t fruitless = 0;;) {
    const bool has_requests = !scheduler_->running().empty() || num_waiting() > 0;
    if (has_requests && !pipeline_->full()) {
      const bool changed = schedule_in_pipeline(now_ns);
      fruitless = changed || pipeline_->computes() ? 0 : fruitless + 1;
      // A request may still have to wait for some schedules to pass; then no schedule will find anything.
      if (fruitless > pipeline_->depth() + config_.pipeline_parallel_size || thrashing()) {
        if (!pipeline_->computes()) pipeline_->clear();
        if (found_work(now_ns)) open_step(now_ns, {}, 0);
        return;
      }
      if (!pipeline_->full()) continue;
    }
    if (pipeline_->empty()) return;
    Pipeline::Flight oldest = pipeline_->pop();
    if (oldest.batch.empty()) continue;
    open_ = std::move(oldest.batch);
    open_.duration_ns = std::max(oldest.end_ns, now_ns) - now_ns;
    return open_step(now_ns, open_.load, open_.duration_ns);
  }
}

// Returns whether the schedule changed anything. Asynchronously a request's next token is computed from one that is
// still in flight: its batch begins when that has left the last stage.
bool VllmEngine::schedule_in_pipeline(std::int64_t now_ns) {
  const std::size_t preempted = scheduler_->log().preempted.size();
  const std::int64_t duration_ns = try_schedule(now_ns);
  Batch batch{scheduler_->log().scheduled, load_, duration_ns};
  const bool computes = !batch.empty();
  std::int64_t ready_ns = now_ns;
  if (computes) timing_.divide_ns(load_, capacity_tokens_, duration_ns, pipeline_->durations_ns());
  for (const Scheduled& turn : scheduler_->log().scheduled)
    ready_ns = std::max(ready_ns, scheduler_->requests()[turn.slot].token_ns);
  const std::int64_t end_ns = pipeline_->push(std::move(batch), ready_ns);
  for (const Scheduled& turn : scheduler_->log().scheduled) {
    EngineRequest& request = scheduler_->decoding().requests[turn.slot];
    ++request.in_flight;
    if (!turn.samples) continue;
    request.token_ns = end_ns;
    if (config_.spaces_decodes) request.eligible_at = scheduler_->counts().schedules + config_.pipeline_parallel_size;
  }
  return computes || scheduler_->log().preempted.size() > preempted;
}

}  // namespace understudy
