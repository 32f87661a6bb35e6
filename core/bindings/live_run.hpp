// A TierRun of engines that Python makes and drops as it likes.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.hpp"
#include "tiers/shared_tier.hpp"

namespace understudy {

// Keeps an engine alive while its transfers are in flight: they land even if Python has dropped the engine.
class LiveRun : public TierRun {
 public:
  using TierRun::TierRun;

  void keep(std::shared_ptr<Engine> engine) {
    std::erase_if(engines_,
                  [](const std::shared_ptr<Engine>& kept) { return kept.use_count() == 1 && !kept->has_transfers(); });
    engines_.push_back(std::move(engine));
  }

 private:
  std::vector<std::shared_ptr<Engine>> engines_;
};

}  // namespace understudy
