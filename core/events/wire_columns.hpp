// Decodes KV events of any dialect straight into columns, for routers. `understudy.events.wire` decodes the same bytes
// field by field; tests compare the two.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "slots/slot.hpp"

namespace understudy {

// Events of many messages of one publisher, a row per event; its blocks are at `offsets` (`understudy.events.columns`).
struct WireColumns {
  std::vector<std::uint8_t> kinds;  // 0 stored, 1 removed, 2 cleared
  std::vector<std::uint8_t> tiers;  // 1 to 4; 0 when cleared
  std::vector<std::uint64_t> parents;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint64_t> sequence_hashes;
  std::vector<std::uint64_t> local_hashes;

  // By message, readable or not.
  std::vector<double> ts;           // seconds; 0 for a message that could not be read
  std::vector<std::int64_t> ranks;  // -1: none

  std::vector<std::uint32_t> malformed;  // messages that are not a batch and were dropped
  std::uint64_t bad_events = 0;          // unreadable or inconsistent; the rest of their batch is kept
  std::uint64_t ignored_events = 0;      // of another cache group or owner, or not local

  // Appends the events of one message's payload.
  void read(std::span<const std::uint8_t> payload);
};

}  // namespace understudy
