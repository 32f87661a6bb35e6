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
  Parked,   // outside the queue while its blocks are loaded
  Loading,  // the same under vLLM's offload: in a queue, holding the blocks that are loaded
  Finished
};

// Fields that every step reads are adjacent, in the cache lines that `warm` prefetches.
struct alignas(64) EngineRequest : KvRequest {
  RequestStatus status = RequestStatus::Waiting;
  std::uint32_t num_computed_tokens = 0;  // known tokens (and tokens in flight) with KV, or with KV being computed
  std::uint32_t ahead = 0;                // sampled, not yet received (asynchronous scheduling)
  std::uint32_t drafts = 0;               // drafts to be verified
  bool prefilling = false;                // its last entry of a batch did not reach the end of its tokens
  TokenRuns tokens;

  RequestRecord record;           // filled in so far
  std::uint32_t first_burst = 0;  // tokens of the step that gave the first

  // Tiers.
  RequestStatus before_park = RequestStatus::Waiting;
  bool onboard_tried = false;  // once for every time in the queue
  std::uint32_t through = 0;   // leading blocks that were offered to the host (write-through)

  // vLLM's offload, and hand-offs.
  bool wants_load = false;          // the host has more of it than there was room for
  bool loaded = false;              // reported, and not yet read
  bool load_failed = false;         // and without its blocks
  std::uint32_t loaded_tokens = 0;  // part of those computed at its admission
  std::int64_t load_begun_ns = 0;
  std::uint64_t last_step = 0;  // last step with this request, counting steps that computed a token

  // Pipeline parallelism.
  std::uint32_t in_flight = 0;    // batches in the pipeline that compute tokens of it
  std::uint64_t eligible_at = 0;  // first schedule that may give it its next token
  std::int64_t token_ns = 0;      // end of the last batch that samples a token of it

  // Its next token is the only one that has no KV.
  bool decodes() const noexcept {
    return num_computed_tokens + 1 == known && num_computed_tokens >= spec.prompt_tokens && !tokens.empty();
  }

  void warm() const noexcept {  // one iteration ahead of its use
    const char* const first = reinterpret_cast<const char*>(this) + 64;
    for (std::size_t line = 0; line < 4; ++line) __builtin_prefetch(first + 64 * line, 1, 3);
  }
};

}  // namespace understudy
