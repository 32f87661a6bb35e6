// Checks events against the store: an index built from events alone must agree with it after every step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "events/event_ring.hpp"

namespace understudy {

// Content of a store, for checks of its events.
class Residency {
 public:
  virtual ~Residency() = default;
  virtual std::size_t num_pools() const noexcept = 0;
  virtual Tier tier(std::size_t pool) const = 0;
  virtual std::size_t num_hashes() const = 0;  // of all pools
  virtual void has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const = 0;
  virtual std::vector<BlockIdentity> resident(std::size_t pool) const = 0;
};

// Index fed with rows of the consolidated stream. Every contradiction throws InvariantViolated.
class EventTruth {
 public:
  // Applies rows that are visible from `time_ns` on. A hash is stored once per tier, on the device after its parent;
  // only resident blocks are removed; time does not go backwards.
  void apply(std::span<const EventRecord> rows, std::int64_t time_ns = 0);
  // Compares the blocks that rows since the last call name with the store.
  enum class Scope : std::uint8_t {
    Below,  // tiers below the device, whose rows are visible at once: O(rows)
    All,    // all tiers, and the number of hashes: O(rows)
    Whole,  // every hash: O(blocks)
  };
  void require_equal(const Residency& store, Scope scope);
  // Compares what a router is shown: exactly the first `known` of `blocks` are on the device, by the events.
  void require_prefix(std::span<const BlockIdentity> blocks, std::size_t known) const;

 private:
  std::int64_t time_ns_ = 0;
  std::array<std::unordered_set<std::uint64_t>, 5> resident_;  // sequence hashes, by tier
  std::array<std::vector<BlockIdentity>, 5> touched_;
};

}  // namespace understudy
