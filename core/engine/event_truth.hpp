// Whether events are the truth: an index that knows nothing else must agree with the store after every step.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "block_store.hpp"

namespace understudy {

// Fed with rows of the consolidated stream. Every contradiction raises InvariantViolated.
class EventTruth {
 public:
  // A hash is stored once and behind its parent, and only what is there is removed.
  void apply(std::span<const EventRecord> rows);
  // What the rows since the last call speak of is as they say, and the number of hashes is right: O(rows). With
  // `whole`, every hash is compared: O(slots).
  void require_equal(const BlockStore& store, bool whole);

 private:
  std::unordered_set<std::uint64_t> resident_;  // sequence hashes
  std::vector<BlockIdentity> touched_;
};

}  // namespace understudy
