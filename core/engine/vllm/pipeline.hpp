// Batches in flight through the stages of a pipeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/batch.hpp"

namespace understudy {

// vLLM's batch queue with pipeline parallelism, and the time of each stage. Batches pass the stages in order; a stage
// computes one at a time. A schedule that found nothing has its place in the queue too.
class Pipeline {
 public:
  struct Flight {
    Batch batch;
    std::int64_t end_ns = 0;  // of the last stage
  };

  // `depth`: batches that are scheduled before the engine waits for the oldest.
  Pipeline(std::size_t stages, std::size_t depth) : durations_ns_(stages), free_ns_(stages), depth_(depth) {}

  std::size_t depth() const noexcept { return depth_; }
  bool full() const noexcept { return queue_.size() >= depth_; }
  bool empty() const noexcept { return queue_.empty(); }
  // A batch with tokens is in flight.
  bool computes() const noexcept;
  const std::deque<Flight>& queue() const noexcept { return queue_; }  // the oldest first
  // Place for the durations of the stages of the batch that is enqueued next.
  std::span<std::int64_t> durations_ns() noexcept { return durations_ns_; }

  // Enqueue a batch whose input is known from `ready_ns` on. Returns the end of its last stage.
  std::int64_t push(Batch batch, std::int64_t ready_ns);
  Flight pop();
  void clear() noexcept { queue_.clear(); }

 private:
  std::deque<Flight> queue_;
  std::vector<std::int64_t> durations_ns_;
  std::vector<std::int64_t> free_ns_;  // by stage: the end of its last batch
  std::size_t depth_;
};

}  // namespace understudy
