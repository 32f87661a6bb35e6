// Interface of an eviction policy: the owner of one order over all unreferenced slots of a pool.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "eviction/fresh_slots.hpp"
#include "slots/slot.hpp"

namespace understudy {

class FrequencySketch;

enum class PolicyKind : std::uint8_t { Lineage, LineageFifo, Lru, MultiLru, Fifo, Vllm, VllmAppend, Advised };

// A slot that became unreferenced (freed) or left the order (taken), as published to a policy outside the lock.
struct PolicyChange {
  SlotId slot = kNoSlot;
  bool freed = false;
  bool cached = false;  // holds the block `lineage`
  LineageHash lineage;
};

// A policy that runs outside the store's lock (one written in Python), so it never blocks the store.
class PolicyAdvisor {
 public:
  virtual ~PolicyAdvisor() = default;
  // Observes `changes` in order and counts them in `observed`, which is valid even when it throws half-way.
  virtual void observe(std::span<const PolicyChange> changes, std::size_t& observed) = 0;
  // Selects the next `count` slots to hand out without forgetting them: a later change reports them as taken.
  virtual std::vector<SlotId> select(std::size_t count) = 0;
};

struct PolicyConfig {
  PolicyKind kind = PolicyKind::Lineage;
  std::array<std::uint32_t, 3> thresholds = {3, 8, 15};  // MultiLru: warm, hot, very hot
  std::shared_ptr<PolicyAdvisor> advisor;                // Advised only
};

// The part of the store that a policy orders: slots [first, first + count).
struct PolicySpace {
  Slot* slots = nullptr;
  SlotId first = 0;
  std::uint32_t count = 0;
  std::array<SlotId, 5> sentinels{};  // for SlotLists
  const FrequencySketch* sketch = nullptr;
};

// All calls come under the store's lock. A slot that is Inactive when inserted is cached; one that is Reset is empty.
// Slots that were never handed out belong to the order without having been inserted.
class EvictionPolicy {
 public:
  explicit EvictionPolicy(const PolicySpace& space) noexcept : fresh_(space.first, space.count) {}
  virtual ~EvictionPolicy() = default;

  // Number of slots that were never handed out: the last ones of the pool.
  std::size_t fresh() const noexcept { return fresh_.size(); }
  // Prepares for the first `slots` of the pool to be in use. May throw bad_alloc; the other calls allocate nothing.
  virtual void grow(std::size_t) {}

  // Adds `slots`, which have just lost their last reference, in this order.
  virtual void insert(std::span<const SlotId> slots) = 0;
  // Returns slots (relative to `first`) that were taken and stayed unused: they are handed out next even where empty
  // slots otherwise are not. Their states may be stale.
  virtual void give_back(std::span<const SlotId> slots, SlotId first) {
    for (const SlotId slot : slots) {
      const SlotId id = first + slot;
      insert({&id, 1});
    }
  }
  // Removes a slot that is referenced or reset again; its identity is still in place.
  virtual void remove(SlotId slot) = 0;
  // Removes many cached slots, each named once. Their states may have changed already.
  virtual void remove_cached(std::span<const SlotId> slots) = 0;
  // Prefetches what removing `slots` needs. kNoSlot and slots outside the order are allowed.
  virtual void warm(std::span<const SlotId>) const {}
  // Refreshes slots that were used without a reference.
  virtual void touch(std::span<const SlotId> slots) = 0;
  // Hands out the next out.size() slots; the caller has checked that there are as many.
  virtual void take(std::span<SlotId> out) = 0;
  // Lists the next `limit` slots in the order of eviction. For tests and reports: may cost O(n log n).
  std::vector<SlotId> order(std::size_t limit) const { return list(fresh_, limit); }
  // Lists the same order without the fresh slots.
  std::vector<SlotId> order_of_used(std::size_t limit) const { return list({}, limit); }

  virtual std::size_t memory_bytes() const { return 0; }
  std::uint64_t steps() const noexcept { return steps_; }

 protected:
  // Lists the order with `fresh` in place of fresh_.
  virtual std::vector<SlotId> list(FreshSlots fresh, std::size_t limit) const = 0;

  FreshSlots fresh_;
  std::uint64_t steps_ = 0;  // list and heap operations, so that complexity can be tested
};

// Throws ConfigError for thresholds out of order or a missing advisor.
std::unique_ptr<EvictionPolicy> make_policy(const PolicyConfig& config, const PolicySpace& space);

}  // namespace understudy
