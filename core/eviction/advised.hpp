// Order of a pool whose policy runs outside the lock: membership, and changes that the advisor has not observed yet.
#pragma once

#include <unordered_map>

#include "eviction/policy.hpp"

namespace understudy {

// Only records. The store asks the advisor between two critical sections, then removes the slots that it selected.
class AdvisedOrder final : public EvictionPolicy {
 public:
  // The advisor also chooses among empty slots, so it observes all of them: this pool has no fresh ones.
  explicit AdvisedOrder(const PolicySpace& space)
      : EvictionPolicy(PolicySpace{}), space_(space), known_(space.count, false) {
    for (SlotId id = space.first; id < space.first + space.count; ++id) record(id, true, false);
  }

  void insert(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) record(id, true, cached(id));
  }
  void remove(SlotId id) override { record(id, false, cached(id)); }
  void remove_cached(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) record(id, false, true);
  }
  void touch(std::span<const SlotId> slots) override {
    for (const SlotId id : slots) {
      if (!cached(id)) continue;
      record(id, false, true);
      record(id, true, true);
    }
  }
  void take(std::span<SlotId>) override {
    throw Error(ErrorKind::InvariantViolated, "an advised pool was asked to choose by itself");
  }

  // Takes the changes that were not published yet, oldest first; they count as published from here on. The caller
  // returns with restore() those that the advisor did not observe.
  std::vector<PolicyChange> pending() {
    std::vector<PolicyChange> out;
    out.swap(changes_);
    for (const PolicyChange& change : out) known_[change.slot - space_.first] = change.freed;
    return out;
  }
  void restore(std::span<const PolicyChange> changes) {
    for (auto change = changes.rbegin(); change != changes.rend(); ++change)
      known_[change->slot - space_.first] = !change->freed;
    changes_.insert(changes_.begin(), changes.begin(), changes.end());
  }
  bool has_pending() const noexcept { return !changes_.empty(); }
  std::size_t memory_bytes() const override { return changes_.capacity() * sizeof(PolicyChange) + known_.size() / 8; }

 private:
  std::vector<SlotId> list(FreshSlots, std::size_t) const override { return {}; }

  bool cached(SlotId id) const { return space_.slots[id].state == SlotState::Inactive; }

  void record(SlotId id, bool freed, bool cached) {
    ++steps_;
    changes_.push_back({id, freed, cached, space_.slots[id].lineage});
    if (changes_.size() > 4 * std::size_t{space_.count} + 1024) compact();
  }

  // Keeps only the net change of each slot, ordered by its last one: without allocations the advisor is never called.
  void compact() {
    std::unordered_map<SlotId, std::size_t> last;
    for (std::size_t i = 0; i < changes_.size(); ++i) last[changes_[i].slot] = i;
    std::vector<PolicyChange> kept;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      const PolicyChange& change = changes_[i];
      if (last[change.slot] != i) continue;
      const bool known = known_[change.slot - space_.first];
      if (known && change.freed) kept.push_back({change.slot, false, change.cached, change.lineage});
      if (known || change.freed) kept.push_back(change);
    }
    changes_.swap(kept);
  }

  PolicySpace space_;
  std::vector<bool> known_;  // whether the slot is in the advisor's order
  std::vector<PolicyChange> changes_;
};

}  // namespace understudy
