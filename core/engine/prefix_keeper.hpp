// `PrefixKeeper`: calls that keep, release or move the KV of a session between two of its requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.hpp"
#include "engine/request.hpp"

namespace understudy {

enum class PrefixAction : std::uint8_t {
  Hold,      // reference the cached blocks of the prefix, so that none is evicted
  Unhold,    // end the session's hold; the blocks stay cached
  Drop,      // end it, and forget the blocks of the prefix that no other request uses
  Offload,   // copy the cached blocks that the host lacks
  Prefetch,  // load the blocks that lower tiers have
};

struct PrefixCall {
  PrefixAction action = PrefixAction::Hold;
  std::uint64_t session = 0;                         // a session has one hold at most
  std::shared_ptr<const IdentitySource> identities;  // not for Unhold
  std::uint32_t tokens = 0;                          // of the prefix
  std::uint32_t kept_tokens = 0;                     // Drop: so many leading tokens stay cached
};

// Numbers of calls, and of the blocks that they concerned.
struct PrefixTotals {
  std::uint64_t holds = 0;
  std::uint64_t yielded_holds = 0;  // ended because a request lacked room
  std::uint64_t held_blocks = 0;    // at the begin of each hold, summed
  std::uint64_t peak_held_blocks = 0;
  double held_block_s = 0;  // blocks times seconds
  std::uint64_t drops = 0;
  std::uint64_t dropped_blocks = 0;
  std::uint64_t offloads = 0;  // that copied something
  std::uint64_t offloaded_blocks = 0;
  std::uint64_t prefetches = 0;  // that loaded something
  std::uint64_t prefetched_blocks = 0;

  PrefixTotals& operator+=(const PrefixTotals& other) noexcept {
    holds += other.holds;
    yielded_holds += other.yielded_holds;
    held_blocks += other.held_blocks;
    peak_held_blocks += other.peak_held_blocks;
    held_block_s += other.held_block_s;
    drops += other.drops;
    dropped_blocks += other.dropped_blocks;
    offloads += other.offloads;
    offloaded_blocks += other.offloaded_blocks;
    prefetches += other.prefetches;
    prefetched_blocks += other.prefetched_blocks;
    return *this;
  }
};

// Held blocks yield: when a request lacks room, holds end, the oldest first.
class PrefixKeeper {
 public:
  virtual ~PrefixKeeper() = default;
  // Why the engine, by its configuration, keeps no prefixes; nothing if it does.
  virtual std::optional<std::string> why_no_prefixes() const = 0;
  virtual const Effects& keep_prefix(const PrefixCall& call, std::int64_t now_ns) = 0;
  virtual PrefixTotals prefix_totals(std::int64_t now_ns) const = 0;
};

}  // namespace understudy
