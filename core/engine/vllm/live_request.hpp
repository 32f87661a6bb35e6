// A request inside the engine, from its arrival to its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/request.hpp"
#include "engine/token_runs.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

enum class RequestStatus : std::uint8_t {
  Waiting,
  Running,
  Preempted,
  Parked,   // its blocks are being loaded, and it waits aside
  Loading,  // the same under vLLM's offload: it waits in a queue, and holds the blocks that they are loaded to
  Finished
};

// What every step looks at stands together, in the lines that `warm` asks for.
struct alignas(64) EngineRequest : KvRequest {
  RequestStatus status = RequestStatus::Waiting;
  std::uint32_t computed = 0;  // of the known tokens (and of those in flight), with KV or being given it
  std::uint32_t ahead = 0;     // sampled, not yet received (asynchronous scheduling)
  std::uint32_t drafts = 0;    // that wait to be verified
  bool passed_over = false;    // in the queue, because the batch had its adapters
  bool prefilling = false;     // its last turn did not reach the end of its tokens
  TokenRuns tokens;

  RequestRecord record;           // what is known by now
  std::uint32_t first_burst = 0;  // tokens of the step that gave the first

  // Tiers.
  RequestStatus before_park = RequestStatus::Waiting;
  bool onboard_tried = false;  // once for every time in the queue
  std::uint32_t through = 0;   // leading blocks that were offered to the host (write-through)

  // vLLM's offload.
  bool wants_load = false;          // the host has more of it than there was room for
  bool loaded = false;              // reported, and nobody has looked since
  std::uint32_t loaded_tokens = 0;  // of those computed at its admission
  std::int64_t load_begun_ns = 0;
  std::uint64_t last_step = 0;  // that had it, of those that computed anything

  void warm() const noexcept {  // a turn ahead of its use
    const char* const first = reinterpret_cast<const char*>(this) + 64;
    for (std::size_t line = 0; line < 3; ++line) __builtin_prefetch(first + 64 * line, 1, 3);
  }
};

}  // namespace understudy
