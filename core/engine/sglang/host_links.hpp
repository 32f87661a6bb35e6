// Copies of HiCache on a clock: one at a time in each direction, in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/sglang/host_cache.hpp"
#include "links/link_usage.hpp"
#include "tiers/tier_config.hpp"

namespace understudy {

class HostLinks final : public HostTransfers {
 public:
  HostLinks(const LinkPairConfig& links, std::uint64_t bytes_per_token, const std::string& worker)
      : down_(links.down, worker + " g1_to_g2"),
        up_(links.up, worker + " g2_to_g1"),
        bytes_per_token_(bytes_per_token) {}

  void set_now(std::int64_t now_ns) noexcept { now_ns_ = std::max(now_ns_, now_ns); }
  std::int64_t now() const override { return now_ns_; }
  std::int64_t write_ready(std::uint64_t tokens, std::int64_t earliest) override {
    return std::max(copy(down_, tokens), earliest);
  }
  std::int64_t load_ready(std::uint64_t tokens) override {
    loaded_ns_ = copy(up_, tokens);
    if (keeps_times_) load_times_ns_.push_back(loaded_ns_ - now_ns_);
    return loaded_ns_;
  }
  void wait_for_write(std::uint64_t tokens) override { written_ns_ = copy(down_, tokens); }

  // Sets the share of bandwidth of copies submitted from now on; earlier ones keep their times.
  void set_share(double share) noexcept { share_ = share; }

  // Duration of each load from here on.
  void keep_times() noexcept { keeps_times_ = true; }
  const std::vector<std::int64_t>& load_times_ns() const noexcept { return load_times_ns_; }
  std::vector<LinkUsage> usage() const { return {down_.usage, up_.usage}; }

  // When the copies end that the batch scheduled last waits for: before it starts, and before it ends.
  std::int64_t written_ns() const noexcept { return written_ns_; }
  std::int64_t loaded_ns() const noexcept { return loaded_ns_; }

 private:
  struct Link {
    Link(const LinkSettings& given, const std::string& name) : settings(given) {
      usage.name = name;
      usage.bandwidth_gbps = given.bandwidth_gbps;
    }

    LinkSettings settings;
    std::int64_t free_ns = 0;
    LinkUsage usage;
  };

  std::int64_t copy(Link& link, std::uint64_t tokens) const {
    const std::uint64_t bytes = tokens * bytes_per_token_;
    const std::int64_t begin_ns = std::max(link.free_ns, now_ns_) + link.settings.fixed_ns;
    const auto flow_ns =
        static_cast<std::int64_t>(std::ceil(static_cast<double>(bytes) / (link.settings.bandwidth_gbps * share_)));
    link.free_ns = begin_ns + flow_ns;
    ++link.usage.transfers_started;
    ++link.usage.transfers_finished;
    link.usage.bytes_started += bytes;
    link.usage.bytes_finished += bytes;
    link.usage.busy_ns += flow_ns;
    link.usage.spread(static_cast<double>(begin_ns), static_cast<double>(link.free_ns), static_cast<double>(bytes));
    return link.free_ns;
  }

  Link down_;
  Link up_;
  std::uint64_t bytes_per_token_;
  double share_ = 1;
  std::int64_t now_ns_ = 0;
  std::int64_t written_ns_ = 0;
  std::int64_t loaded_ns_ = 0;
  bool keeps_times_ = false;
  std::vector<std::int64_t> load_times_ns_;
};

}  // namespace understudy
