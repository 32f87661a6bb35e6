// What the tiers below the device are, how fast they are reached, and what goes there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "eviction/policy.hpp"

namespace understudy {

// When blocks are copied from the device to the host.
enum class OffloadMode : std::uint8_t {
  OnEviction,    // when the device evicts them; the slot is held until the copy has left
  WriteThrough,  // as soon as they are computed; eviction then costs nothing
};

struct OffloadCandidate {
  BlockIdentity identity;
  std::uint32_t reuse = 0;  // hits while it was on the device
};

// A policy of the user's: which blocks are worth a copy to the host.
class OffloadFilter {
 public:
  virtual ~OffloadFilter() = default;
  // Sets keep[i] for each candidate that is; all are 0 before.
  virtual void select(std::span<const OffloadCandidate> candidates, std::span<std::uint8_t> keep) = 0;
};

struct LinkSettings {
  double bandwidth_gbps = std::numeric_limits<double>::infinity();  // 10^9 bytes per second
  std::int64_t fixed_ns = 0;                                        // per transfer, before its bytes flow
};

// The way to a tier and back.
struct WayConfig {
  LinkSettings down;
  LinkSettings up;
  double duplex_gbps = std::numeric_limits<double>::infinity();  // both directions together
};

inline constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

// A tier that belongs to the run. A copy crosses the worker's own link and the tier's, at the lesser of its shares.
struct SharedTierConfig {
  std::uint64_t num_blocks = 0;
  PolicyConfig policy{PolicyKind::Lru, {3, 8, 15}, nullptr};
  WayConfig worker;
  WayConfig backend;
  std::uint32_t offload_concurrency = kNoLimit;  // copies that a worker has under way to it; others queue
};

struct TierConfig {
  std::uint64_t bytes_per_block = 0;
  std::uint64_t g2_blocks = 0;
  std::function<PolicyConfig()> g2_policy;  // of each worker's host; none: LRU
  bool g2_policy_is_users = false;          // it makes policies of the user's, or one for all workers
  WayConfig host;
  std::uint32_t offload_concurrency = kNoLimit;  // copies that a worker has under way to its host; others queue
  bool demand_first = false;                     // loads that a request waits for go before copies down

  OffloadMode mode = OffloadMode::OnEviction;
  bool exclusive = false;                 // a block that returns to the device leaves the host
  std::uint32_t min_reuse = 0;            // hits on the device before a block is worth a copy
  std::shared_ptr<OffloadFilter> filter;  // none: all
  std::uint32_t offload_batch_size = 32;  // blocks in one copy

  bool onboard_preempted = true;    // preempted requests load too
  bool recompute_fallback = true;   // do not load what is computed sooner
  double onboard_failure_rate = 0;  // of loads, by chance; the request computes instead
  std::uint64_t seed = 0;

  // As many blocks as there can ever be, those on their way counted twice: no tier takes memory for more.
  std::uint64_t most_blocks = std::numeric_limits<std::uint64_t>::max();
  // Slots for a tier of `blocks`: where less is enough nothing is ever evicted, in whatever order.
  std::uint64_t slots_for(std::uint64_t blocks, const PolicyConfig& policy) const noexcept {
    return policy.kind == PolicyKind::MultiLru ? blocks : std::min(blocks, most_blocks);
  }

  std::optional<SharedTierConfig> g3;
  std::optional<SharedTierConfig> g4;
};

}  // namespace understudy
