// How requests are named: to those outside an engine, and inside it.
#pragma once

#include <cstdint>

namespace understudy {

// Counts the submissions to one engine, from 0. Never used again, so that an old one is known as such.
using RequestId = std::uint64_t;

// Where an engine keeps a request that has not ended, and how its tiers name it. Used again.
using RequestSlot = std::uint32_t;

}  // namespace understudy
