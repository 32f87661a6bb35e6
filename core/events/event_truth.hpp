// Whether events are the truth: an index that knows nothing else must agree with the store after every step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// What a store holds, for who checks what it tells.
class Residency {
 public:
  virtual ~Residency() = default;
  virtual std::size_t num_pools() const noexcept = 0;
  virtual Tier tier(std::size_t pool) const = 0;
  virtual std::size_t num_hashes() const = 0;  // of all pools
  virtual void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const = 0;
  virtual std::vector<BlockIdentity> resident(std::size_t pool) const = 0;
};

// Fed with rows of the consolidated stream. Every contradiction raises InvariantViolated.
class EventTruth {
 public:
  // Rows that are visible from `time_ns` on. A hash is stored once on a tier, and on the device behind its parent; only
  // what is there is removed; and nothing is visible before what came earlier.
  void apply(std::span<const EventRecord> rows, std::int64_t time_ns = 0);
  // What the rows since the last call speak of is as they say.
  enum class Scope : std::uint8_t {
    Below,  // on tiers below the device, whose rows a step does not hold back: O(rows)
    All,    // everywhere, and the number of hashes is right: O(rows)
    Whole,  // every hash: O(blocks)
  };
  void require_equal(const Residency& store, Scope scope);

 private:
  std::int64_t time_ns_ = 0;
  std::array<std::unordered_set<std::uint64_t>, 5> resident_;  // sequence hashes, by tier
  std::array<std::vector<BlockIdentity>, 5> touched_;
};

}  // namespace understudy
