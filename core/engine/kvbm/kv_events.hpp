// KV events of a manager: one row per block, grouped into the events of two streams.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// Rows that follow each other with one id are one event. Ids count from 0 in each stream.
struct KvEventRow {
  static constexpr std::uint64_t kSilent = std::numeric_limits<std::uint64_t>::max();

  BlockIdentity identity;
  std::uint64_t generation = 0;
  EventKind kind = EventKind::Stored;
  std::uint64_t raw_id = 0;
  std::uint64_t raw_parent = 0;             // parent of the event's first block, as the engine would report it; 0: none
  std::uint64_t consolidated_id = kSilent;  // kSilent: not the first copy stored, or not the last removed
};

struct KvEventRows {
  std::vector<KvEventRow> rows;
  std::vector<Token> tokens;  // block_size for every Stored row, if token ids are requested
};

// Stored rows that are one event of the raw stream, from row `first` of its call on.
struct StoredRun {
  std::size_t first = 0;
  std::uint64_t parent = 0;
};

class KvEventLog {
 public:
  // Add the rows of one call to the manager: first stored blocks, in the given runs, then removed ones.
  void add(const DrainedEvents& call, std::span<const StoredRun> runs);
  KvEventRows drain() noexcept { return std::exchange(kept_, {}); }

 private:
  void add_kind(const DrainedEvents& call, EventKind kind, std::span<const StoredRun> runs);

  KvEventRows kept_;
  std::uint64_t next_raw_ = 0;
  std::uint64_t next_consolidated_ = 0;
};

}  // namespace understudy
