// A HandOffNet of engines that Python makes and steps, with transfers of its own.
#pragma once

#include "engine/handoff_net.hpp"
#include "tiers/transfer_hub.hpp"

namespace understudy {

class LiveNet {
 public:
  explicit LiveNet(const HandOffLinks& links) : net_(hub_, links) {}
  LiveNet(const LiveNet&) = delete;
  LiveNet& operator=(const LiveNet&) = delete;

  HandOffNet& net() noexcept { return net_; }
  TransferHub& hub() noexcept { return hub_; }

 private:
  TransferHub hub_;
  HandOffNet net_;
};

}  // namespace understudy
