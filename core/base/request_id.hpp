// Names of a request: outside its engine (id) and inside (slot).
#pragma once

#include <cstdint>

namespace understudy {

// Chosen by the driver of an engine. Never used twice in one engine, so that an old id is known as such.
using RequestId = std::uint64_t;

// Index of an unfinished request in its engine and its tiers. Reused.
using RequestSlot = std::uint32_t;

}  // namespace understudy
