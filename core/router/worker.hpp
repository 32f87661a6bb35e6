// Workers of a fleet, as routers and runs name them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace understudy {

struct GroupLayout;

// Assigned in the order in which workers appear. A worker that leaves keeps its id; no other worker gets it.
using WorkerId = std::size_t;

// The stages of a request that a worker serves.
enum class WorkerRole : std::uint8_t { Both, Prefill, Decode };

// The part of a request that a worker is wanted for.
enum class RequestStage : std::uint8_t { Whole, Prefill, Decode };

enum class WorkerState : std::uint8_t {
  Starting,  // serves no request yet
  Ready,     // may be chosen
  Draining,  // serves the requests that it has
  Gone,
};

inline bool serves(WorkerRole role, RequestStage stage) noexcept {
  switch (stage) {
    case RequestStage::Whole:
      return role == WorkerRole::Both;
    case RequestStage::Prefill:
      return role != WorkerRole::Decode;
    case RequestStage::Decode:
      return role != WorkerRole::Prefill;
  }
  return false;
}

// Facts of a worker that do not change while it exists.
struct WorkerInfo {
  WorkerId id = 0;
  std::uint32_t pool = 0;  // whose shared tiers it reaches
  WorkerRole role = WorkerRole::Both;
  std::uint64_t batch_tokens = 0;                       // prompt tokens that fit into one of its steps
  std::shared_ptr<const GroupLayout> groups = nullptr;  // of its cache; null: one group of full attention
};

// Counts that a router keeps itself, from the requests that it sent and their ends.
struct WorkerLoad {
  std::uint64_t outstanding_requests = 0;
  std::uint64_t outstanding_tokens = 0;  // prompt and requested output
};

// Counts that a worker reports.
struct WorkerCounts {
  std::uint64_t running = 0;
  std::uint64_t waiting = 0;
  std::uint64_t used_blocks = 0;  // referenced
  std::uint64_t total_blocks = 0;
};

}  // namespace understudy
