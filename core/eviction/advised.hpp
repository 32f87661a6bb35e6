// The order of a pool whose policy lives outside the lock: membership, and what the advisor has yet to be told.
#pragma once

#include <unordered_map>

#include "eviction/policy.hpp"

namespace understudy {

// Only records. The store asks the advisor between two critical sections and then removes the slots it named.
class AdvisedOrder final : public EvictionPolicy {
 public:
  // The advisor chooses among empty slots too, so it is told of all of them: this pool has no fresh ones.
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

  // Changes not told yet, oldest first. The caller tells the advisor and gives back, with untold(), what it could not.
  // They count as told from here on: whatever happens meanwhile comes after them.
  std::vector<PolicyChange> pending() {
    std::vector<PolicyChange> out;
    out.swap(changes_);
    for (const PolicyChange& change : out) known_[change.slot - space_.first] = change.freed;
    return out;
  }
  void untold(std::span<const PolicyChange> changes) {
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

  // Without allocations nobody asks the advisor: keep only each slot's net change, in order of its last one.
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
  std::vector<bool> known_;  // the advisor believes the slot to be in its order
  std::vector<PolicyChange> changes_;
};

}  // namespace understudy
