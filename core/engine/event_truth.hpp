// Whether events are the truth: an index that knows nothing else must agree with the store after every step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "block_store.hpp"

namespace understudy {

// Fed with rows of the consolidated stream. Every contradiction raises InvariantViolated.
class EventTruth {
 public:
  // A hash is stored once on a tier, and on the device behind its parent; only what is there is removed.
  void apply(std::span<const EventRecord> rows);
  // What the rows since the last call speak of is as they say, and the number of hashes is right: O(rows). With
  // `whole`, every hash is compared: O(slots).
  void require_equal(const BlockStore& store, bool whole);

 private:
  std::array<std::unordered_set<std::uint64_t>, 5> resident_;  // sequence hashes, by tier
  std::array<std::vector<BlockIdentity>, 5> touched_;
};

}  // namespace understudy
