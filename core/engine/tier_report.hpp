// What the tiers of an engine have done until its end.
#pragma once

#include <cstdint>
#include <vector>

#include "slots/slot.hpp"
#include "tiers/tier_totals.hpp"

namespace understudy {

class TierRun;

// Of one tier that is the engine's own.
struct TierUse {
  Tier tier = Tier::G1;
  std::uint64_t capacity_blocks = 0;
  std::uint64_t resident_blocks = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t evicted_blocks = 0;
};

struct TierReport {
  std::vector<TierUse> own;            // the device first
  TierTotals totals;                   // of copies and loads
  std::vector<std::int64_t> loads_ns;  // how long each took, if that was kept
  TierRun* run = nullptr;              // what it has for itself of the rest: tiers below, and links; null: nothing
};

}  // namespace understudy
