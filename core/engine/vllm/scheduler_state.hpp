// Counts of a scheduler, and the part of it that a fast-forward changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/vllm/admission.hpp"
#include "engine/vllm/live_request.hpp"
#include "engine/vllm/waiting_queues.hpp"

namespace understudy {

struct SchedulerCounts {
  std::uint64_t submitted = 0;
  std::uint64_t schedules = 0;
  std::size_t parked = 0;                   // requests outside the queues while their blocks are loaded
  std::size_t loading = 0;                  // the same in a queue, of a connector
  bool has_ended = false;                   // a request, since the last schedule
  std::uint64_t fruitless_preemptions = 0;  // since the last token
};

// Steps that computed a token.
struct StepCounts {
  std::uint64_t scheduled = 0;
  std::uint64_t processed = 0;
};

struct Decoding {
  std::vector<EngineRequest>& requests;  // by slot
  std::vector<RequestSlot>& running;
  const WaitingQueues& waiting;
  Refusal& refusal;
  StepCounts& steps;
};

}  // namespace understudy
