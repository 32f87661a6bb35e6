// Measures a worker's open step and its queue for a scaler.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/engine.hpp"
#include "engine/step_view.hpp"
#include "replay/elastic.hpp"

namespace understudy {

// A request that a worker has, and its length now: prompt and output so far.
struct SentRequest {
  RequestId id = 0;
  std::uint64_t length = 0;
  bool has_tokens = false;
};

class StepMeter {
 public:
  // Fills in all but worker, pool and state. `sent`: requests of the engine, in the order in which it received them.
  void measure(Engine& engine, std::span<const SentRequest> sent, WorkerMetrics& out);

 private:
  StepView view_;                     // scratch
  std::vector<RequestId> scheduled_;  // scratch
};

}  // namespace understudy
