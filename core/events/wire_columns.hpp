// KV events as engines send them, in whichever dialect, straight into columns: what a router does with every message.
// `understudy.events.wire` reads the same bytes field by field, for people; tests hold the two together.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "slots/slot.hpp"

namespace understudy {

// Events of many messages of one publisher, a row an event, its blocks behind `offsets` (`understudy.events.columns`).
struct WireColumns {
  std::vector<std::uint8_t> kinds;  // 0 stored, 1 removed, 2 cleared
  std::vector<std::uint8_t> tiers;  // 1 to 4; 0 when cleared
  std::vector<std::uint64_t> parents;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint64_t> sequence_hashes;
  std::vector<std::uint64_t> local_hashes;

  // By message, those that could be read or not.
  std::vector<std::int64_t> message_events{0};  // events before message i, and behind the last
  std::vector<double> ts;                       // seconds; 0 of a message that could not be read
  std::vector<std::int64_t> ranks;              // -1: none

  std::vector<std::uint32_t> malformed;  // messages that are no batch: nothing of them is here
  std::uint64_t bad_events = 0;          // could not be read, or contradict themselves; the rest of their batch is here
  std::uint64_t ignored_events = 0;      // of another cache group, of another owner, or not local

  // Reads one message's payload behind what is there.
  void read(std::span<const std::uint8_t> payload);
};

}  // namespace understudy
