// When a transfer would end: what "load or recompute" hangs on, and what those who ask for a block on its way are told.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tiers/tier_config.hpp"

namespace understudy {

// From what is under way when it starts, as if none of that ended before and nobody came: with equal transfers it is
// what the links then do; otherwise no earlier than that, as long as nobody comes.
class TransferEstimate {
 public:
  explicit TransferEstimate(const TierConfig& config) : config_(config) {}

  // Device to host, beside `copies` on the same link.
  std::int64_t copy_ns(std::uint64_t bytes, std::uint64_t copies) const {
    const WayConfig& host = config_.host;
    return host.down.fixed_ns + flow_ns(host, host.down, bytes, 1 + copies, 0);
  }
  // Host to a shared tier, beside this worker's other `copies` there.
  std::int64_t lower_copy_ns(const SharedTierConfig& tier, std::uint64_t bytes, std::uint64_t copies) const {
    return tier.worker.down.fixed_ns + tier.backend.down.fixed_ns +
           std::max(flow_ns(tier.worker, tier.worker.down, bytes, 1 + copies, 0),
                    flow_ns(tier.backend, tier.backend.down, bytes, 1 + copies, 0));
  }
  // A shared tier to the host, beside `loads` of anybody's from it and this worker's `copies` to it.
  std::int64_t stage_ns(const SharedTierConfig& tier, std::uint64_t bytes, std::uint64_t loads,
                        std::uint64_t copies) const {
    const std::uint64_t across = config_.demand_first ? 0 : copies;
    return tier.worker.up.fixed_ns + tier.backend.up.fixed_ns +
           std::max(flow_ns(tier.worker, tier.worker.up, bytes, 1, across),
                    flow_ns(tier.backend, tier.backend.up, bytes, 1 + loads, across));
  }
  // Host to device, beside `loads` on the same link and `copies` the other way.
  std::int64_t load_ns(std::uint64_t bytes, std::uint64_t loads, std::uint64_t copies) const {
    const WayConfig& host = config_.host;
    return host.up.fixed_ns + flow_ns(host, host.up, bytes, 1 + loads, config_.demand_first ? 0 : copies);
  }

 private:
  static constexpr double kAgesNs = 0x1p60;  // longer than links go on; sums of some are still times

  // At an equal share of the link among `sharers`, and of the cap over both directions among those and `across`;
  // nothing where bandwidth has no limit.
  static std::int64_t flow_ns(const WayConfig& way, const LinkSettings& link, std::uint64_t bytes,
                              std::uint64_t sharers, std::uint64_t across) {
    const auto alone = [bytes](double bandwidth_gbps, std::uint64_t among) {
      const double ns = static_cast<double>(bytes) * static_cast<double>(among) / bandwidth_gbps;
      return std::llround(std::ceil(std::min(ns, kAgesNs)));
    };
    return std::max(alone(link.bandwidth_gbps, sharers), alone(way.duplex_gbps, sharers + across));
  }

  const TierConfig& config_;
};

}  // namespace understudy
