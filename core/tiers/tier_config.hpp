// Settings of the tiers below the device: sizes, links, and which blocks are copied there.
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

// User-defined filter: which blocks are worth a copy to the host.
class OffloadFilter {
 public:
  virtual ~OffloadFilter() = default;
  // Sets keep[i] for each candidate to copy; all are 0 before.
  virtual void select(std::span<const OffloadCandidate> candidates, std::span<std::uint8_t> keep) = 0;
};

struct LinkSettings {
  double bandwidth_gbps = std::numeric_limits<double>::infinity();  // 10^9 bytes per second
  std::int64_t fixed_ns = 0;                                        // per transfer, before its bytes flow
};

// The links to a tier and back.
struct LinkPairConfig {
  LinkSettings down;
  LinkSettings up;
  double duplex_gbps = std::numeric_limits<double>::infinity();  // both directions together
};

inline constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

// A tier that the run shares. A copy crosses the worker's link and the tier's, at the lesser of its shares.
struct SharedTierConfig {
  std::uint64_t num_blocks = 0;
  PolicyConfig policy{PolicyKind::Lru, {3, 8, 15}, nullptr};
  LinkPairConfig worker;
  LinkPairConfig backend;
  std::uint32_t offload_concurrency = kNoLimit;  // most copies of a worker in flight to it; others queue
};

struct TierConfig {
  std::uint64_t bytes_per_block = 0;
  std::uint64_t g2_blocks = 0;
  std::function<PolicyConfig()> g2_policy;  // for each worker's host; none: LRU
  bool g2_policy_is_users = false;          // user-defined, or one instance for all workers
  LinkPairConfig host;
  std::uint32_t offload_concurrency = kNoLimit;  // most copies of a worker in flight to its host; others queue
  bool demand_first = false;                     // loads that a request waits for have priority over copies down

  OffloadMode mode = OffloadMode::OnEviction;
  bool exclusive = false;                 // a block that is loaded to the device leaves the host
  std::uint32_t min_reuse = 0;            // hits on the device before a block qualifies for a copy
  std::shared_ptr<OffloadFilter> filter;  // none: all qualify
  std::uint32_t offload_batch_size = 32;  // blocks in one copy

  bool onboard_preempted = true;    // preempted requests load too
  bool recompute_fallback = true;   // do not load blocks that are computed sooner
  double onboard_failure_rate = 0;  // probability per load; the request computes instead
  std::uint64_t seed = 0;

  // Upper bound on blocks, counting those on their way twice: no tier allocates memory for more.
  std::uint64_t most_blocks = std::numeric_limits<std::uint64_t>::max();
  // Slots for a tier of `blocks`; fewer when nothing can ever be evicted.
  std::uint64_t slots_for(std::uint64_t blocks, const PolicyConfig& policy) const noexcept {
    return policy.kind == PolicyKind::MultiLru ? blocks : std::min(blocks, most_blocks);
  }

  std::optional<SharedTierConfig> g3;
  std::optional<SharedTierConfig> g4;
};

}  // namespace understudy
