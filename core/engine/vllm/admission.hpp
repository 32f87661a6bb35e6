// Scheduler state about waiting requests: the candidate for admission, and why it was not admitted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/request.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

// The head of the queue, as the current step could admit it.
struct Admission {
  RequestSlot slot = 0;
  std::uint32_t limit = 0;  // most tokens that a lookup may find
  KvHit hit;
  std::uint32_t hit_tokens = 0;  // of the hit, or computed before
  std::uint32_t wanted = 0;      // tokens to compute with an unlimited budget
  std::uint32_t tokens = 0;      // tokens to compute in this step
  bool padded = false;           // with blank drafts
  bool too_long = false;         // does not fit the remaining budget without chunks
  bool has_loaded = false;       // its load has ended
  bool slow_load = false;        // tiers have more of its blocks, but loading takes longer than computing

  std::uint32_t total() const noexcept { return hit_tokens + tokens; }
};

// The head of the queue was not admitted and stays refused while `stands` is set: the other requests only decode.
struct Refusal {
  bool stands = false;
  bool no_room = false;  // blocks were lacking
  bool wants_block = false;
  std::uint64_t missing = 0;  // hash of the block that would lengthen its hit
  // With several KV cache groups: blocks that must be free for it, and the pool's count of evictions up to which its
  // hit is sure to be whole.
  std::uint64_t needs = 0;
  std::uint64_t evictions = 0;
  std::uint64_t released = 0;  // blocks that the tiers had released by then
  // The head cannot be admitted before tiers have freed `lacks` blocks, unless a load ends (the count was
  // `loads_ended`).
  std::uint64_t lacks = 0;
  std::uint64_t loads_ended = 0;
};

}  // namespace understudy
