// Estimated transfer times, for the choice between loading and recomputing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tiers/tier_config.hpp"

namespace understudy {

// Assumes that the transfers in flight at the start neither end nor gain competitors: exact for equal transfers,
// otherwise an upper bound as long as no transfer joins.
class TransferEstimate {
 public:
  explicit TransferEstimate(const TierConfig& config) : config_(config) {}

  // Device to host, with `copies` others on the same link.
  std::int64_t copy_ns(std::uint64_t bytes, std::uint64_t copies) const {
    const LinkPairConfig& host = config_.host;
    return host.down.fixed_ns + flow_ns(host, host.down, bytes, 1 + copies, 0);
  }
  // Host to a shared tier, with this worker's `copies` others there.
  std::int64_t lower_copy_ns(const SharedTierConfig& tier, std::uint64_t bytes, std::uint64_t copies) const {
    return tier.worker.down.fixed_ns + tier.backend.down.fixed_ns +
           std::max(flow_ns(tier.worker, tier.worker.down, bytes, 1 + copies, 0),
                    flow_ns(tier.backend, tier.backend.down, bytes, 1 + copies, 0));
  }
  // Shared tier to host, with `loads` of all workers from it and this worker's `copies` to it.
  std::int64_t stage_ns(const SharedTierConfig& tier, std::uint64_t bytes, std::uint64_t loads,
                        std::uint64_t copies) const {
    const std::uint64_t across = config_.demand_first ? 0 : copies;
    return tier.worker.up.fixed_ns + tier.backend.up.fixed_ns +
           std::max(flow_ns(tier.worker, tier.worker.up, bytes, 1, across),
                    flow_ns(tier.backend, tier.backend.up, bytes, 1 + loads, across));
  }
  // Host to device, with `loads` on the same link and `copies` in the other direction.
  std::int64_t load_ns(std::uint64_t bytes, std::uint64_t loads, std::uint64_t copies) const {
    const LinkPairConfig& host = config_.host;
    return host.up.fixed_ns + flow_ns(host, host.up, bytes, 1 + loads, config_.demand_first ? 0 : copies);
  }

 private:
  static constexpr double kMaxNs = 0x1p60;  // beyond the limit of links; sums of a few still fit

  // Time at an equal share of the link among `sharers`, and of the cap over both directions among those and `across`; 0
  // without a limit.
  static std::int64_t flow_ns(const LinkPairConfig& pair, const LinkSettings& link, std::uint64_t bytes,
                              std::uint64_t sharers, std::uint64_t across) {
    const auto alone = [bytes](double bandwidth_gbps, std::uint64_t among) {
      const double ns = static_cast<double>(bytes) * static_cast<double>(among) / bandwidth_gbps;
      return std::llround(std::ceil(std::min(ns, kMaxNs)));
    };
    return std::max(alone(link.bandwidth_gbps, sharers), alone(pair.duplex_gbps, sharers + across));
  }

  const TierConfig& config_;
};

}  // namespace understudy
