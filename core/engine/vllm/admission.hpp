// What a scheduler remembers of those who wait: the one that it could admit, and why it did not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/request.hpp"
#include "engine/vllm/kv_backend.hpp"

namespace understudy {

// The head of the queue, as the step at hand could admit it.
struct Admission {
  RequestSlot slot = 0;
  std::size_t limit = 0;  // blocks that it could find at most
  KvHit hit;
  std::uint32_t hit_tokens = 0;
  std::uint32_t wanted = 0;  // tokens that it would compute if the budget were no matter
  std::uint32_t tokens = 0;  // that it does
  bool padded = false;       // with blank drafts
  bool too_long = false;     // without chunks, for the budget that is left
  bool slow_load = false;    // tiers have more of it, and would take longer than computing it

  std::uint32_t total() const noexcept { return hit_tokens + tokens; }
};

// The head of the queue was not admitted, and will not be while this stands: the others only decode.
struct Refusal {
  bool stands = false;
  bool wants_block = false;
  LineageHash missing;         // the block that would lengthen its hit
  std::uint64_t released = 0;  // by the tiers until then
  // It cannot go before tiers have made so many blocks free, unless a load ends, of which there were so many.
  std::uint64_t lacks = 0;
  std::uint64_t loads_ended = 0;
  bool has_preempted = false;  // in a schedule that failed then: the one that takes its place admits nobody either
};

// Nothing can be computed before a transfer lands, unless somebody comes or goes.
struct LandingWait {
  bool on = false;
  bool visited = false;        // somebody came or went since the last step began
  std::uint64_t released = 0;  // by the tiers until then
};

}  // namespace understudy
