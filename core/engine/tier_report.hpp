// Report of an engine's tiers at its end.
#pragma once

#include <cstdint>
#include <vector>

#include "links/link.hpp"
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
  std::vector<LinkUsage> links;        // links that no hub has
  TierRun* run = nullptr;              // the engine's own lower tiers and links; null: none
  const Links* hub = nullptr;          // links that workers share; null: none
  std::vector<LinkId> hub_links;       // those of this worker
};

}  // namespace understudy
