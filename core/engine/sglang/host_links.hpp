// Copies of HiCache on a clock: one at a time in each direction, in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "engine/sglang/host_cache.hpp"
#include "tiers/tier_config.hpp"

namespace understudy {

class HostLinks final : public HostTransfers {
 public:
  HostLinks(const LinkPairConfig& links, std::uint64_t bytes_per_token)
      : links_(links), bytes_per_token_(bytes_per_token) {}

  void set_now(std::int64_t now_ns) noexcept { now_ns_ = std::max(now_ns_, now_ns); }
  std::int64_t now() const override { return now_ns_; }
  std::int64_t write_ready(std::uint64_t tokens, std::int64_t earliest) override {
    return std::max(copy(links_.down, down_free_ns_, tokens), earliest);
  }
  std::int64_t load_ready(std::uint64_t tokens) override { return loaded_ns_ = copy(links_.up, up_free_ns_, tokens); }
  void wait_for_write(std::uint64_t tokens) override { written_ns_ = copy(links_.down, down_free_ns_, tokens); }

  // When the copies end that the batch scheduled last waits for: before it starts, and before it ends.
  std::int64_t written_ns() const noexcept { return written_ns_; }
  std::int64_t loaded_ns() const noexcept { return loaded_ns_; }

 private:
  std::int64_t copy(const LinkSettings& link, std::int64_t& free_ns, std::uint64_t tokens) const {
    const double flow_ns = static_cast<double>(tokens * bytes_per_token_) / link.bandwidth_gbps;
    return free_ns = std::max(free_ns, now_ns_) + link.fixed_ns + static_cast<std::int64_t>(std::ceil(flow_ns));
  }

  LinkPairConfig links_;
  std::uint64_t bytes_per_token_;
  std::int64_t now_ns_ = 0;
  std::int64_t down_free_ns_ = 0;
  std::int64_t up_free_ns_ = 0;
  std::int64_t written_ns_ = 0;
  std::int64_t loaded_ns_ = 0;
};

}  // namespace understudy
