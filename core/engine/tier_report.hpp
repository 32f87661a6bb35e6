// Report of an engine's tiers at its end.
#pragma once

#include <cstdint>
#include <vector>

#include "links/link_usage.hpp"
#include "slots/slot.hpp"
#include "tiers/tier_totals.hpp"

namespace understudy {

class TierRun;

// Use of one tier that the engine owns.
struct TierUse {
  Tier tier = Tier::G1;
  std::uint64_t capacity_blocks = 0;
  std::uint64_t resident_blocks = 0;
  std::uint64_t stored_blocks = 0;
  std::uint64_t evicted_blocks = 0;
};

struct TierReport {
  std::vector<TierUse> own;            // the device first
  TierTotals totals;                   // copies and loads
  std::vector<std::int64_t> loads_ns;  // duration of each, if kept
  std::vector<LinkUsage> links;        // links that no run has
  TierRun* run = nullptr;              // the engine's own lower tiers and links; null: none
};

}  // namespace understudy
