// Names of a request: outside its engine (id) and inside (slot).
#pragma once

#include <cstdint>

namespace understudy {

// Number of the submission to one engine, from 0. Never reused, so a stale id is recognised.
using RequestId = std::uint64_t;

// Index of an unfinished request in its engine and its tiers. Reused.
using RequestSlot = std::uint32_t;

}  // namespace understudy
