// A request inside the engine, from its arrival to its end.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/request.hpp"
#include "engine/token_log.hpp"
#include "slots/slot.hpp"

namespace understudy {

enum class RequestStatus : std::uint8_t {
  Waiting,
  Running,
  Preempted,
  Parked,
  Finished
};  // Parked: its blocks are being loaded

struct EngineRequest {
  RequestId id = 0;
  RequestSpec spec;
  RequestStatus status = RequestStatus::Waiting;

  std::uint32_t known = 0;         // prompt and the outputs that the scheduler has received
  std::uint32_t computed = 0;      // of them (and of those in flight), with KV or being given it
  std::uint32_t ahead = 0;         // sampled, not yet received (asynchronous scheduling)
  std::uint32_t drafts = 0;        // that wait to be verified
  bool prefilling = false;         // its last turn did not reach the end of its tokens
  std::uint32_t keyed = 0;         // leading blocks of `table` that are registered
  std::uint32_t keyed_before = 0;  // `keyed` before this step's allocation
  std::vector<SlotId> table;
  std::vector<BlockIdentity> blocks;  // identities computed so far

  std::uint32_t outputs() const noexcept { return known - spec.prompt_tokens; }

  RequestRecord record;           // what is known by now
  std::uint32_t first_burst = 0;  // tokens of the step that gave the first

  // Tiers.
  RequestStatus before_park = RequestStatus::Waiting;
  bool onboard_tried = false;  // once for every time in the queue
  std::uint32_t through = 0;   // leading blocks that were offered to the host (write-through)

  std::vector<TokenRun> tokens;
};

}  // namespace understudy
