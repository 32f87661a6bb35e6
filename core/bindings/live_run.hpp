// A TierRun of engines that Python makes and drops as it likes.
#pragma once

#include <memory>
#include <vector>

#include "engine/vllm/engine.hpp"
#include "tiers/shared_tier.hpp"

namespace understudy {

// Keeps an engine alive while its transfers are in flight: they land even if Python has dropped the engine.
class LiveRun : public TierRun {
 public:
  using TierRun::TierRun;

  void keep(std::shared_ptr<VllmEngine> engine) {
    std::erase_if(engines_, [](const std::shared_ptr<VllmEngine>& kept) {
      const OffloadLinks* const offload = kept->offload_links();
      return kept.use_count() == 1 && kept->tiers()->idle() && (offload == nullptr || offload->idle());
    });
    engines_.push_back(std::move(engine));
  }

 private:
  std::vector<std::shared_ptr<VllmEngine>> engines_;
};

}  // namespace understudy
