// Rows of live streams only.
#pragma once

#include "events/event_ring.hpp"

namespace understudy {

// A row without a block: a worker lost all blocks of a tier, or (tier 0) of all tiers.
inline constexpr EventKind kCleared{2};

}  // namespace understudy
