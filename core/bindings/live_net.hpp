// A HandOffNet of engines that Python makes and steps, with transfers of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "engine/handoff_net.hpp"
#include "engine/sglang/push_net.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

class LiveNet {
 public:
  explicit LiveNet(const HandOffLinks& links) : net_(hub_, links), pushes_(net_) {}
  LiveNet(const LiveNet&) = delete;
  LiveNet& operator=(const LiveNet&) = delete;

  HandOffNet& net() noexcept { return net_; }
  TransferHub& hub() noexcept { return hub_; }
  PushNet& pushes() noexcept { return pushes_; }

  // Transfers end before a limit of the same time.
  void run_until(std::int64_t now_ns) {
    hub_.run_until(now_ns);
    pushes_.expire(now_ns);
  }
  std::optional<std::int64_t> next_wake_ns() {
    const std::optional<std::int64_t> next = hub_.next_wake_ns();
    const std::int64_t limit = pushes_.next_limit_ns();
    if (limit == PushNet::kNever) return next;
    return std::min(next.value_or(limit), limit);
  }

 private:
  TransferHub hub_;
  HandOffNet net_;
  PushNet pushes_;
};

}  // namespace understudy
