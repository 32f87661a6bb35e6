// What an eviction policy is: the owner of one order over all unreferenced slots of a pool.
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

// A slot that became unreferenced (freed) or left the order (taken): what a policy outside the lock is told.
struct PolicyChange {
  SlotId slot = kNoSlot;
  bool freed = false;
  bool cached = false;  // it carries a block, `lineage`
  LineageHash lineage;
};

// A policy that runs outside the store's lock (one written in Python). It never blocks the store.
class PolicyAdvisor {
 public:
  virtual ~PolicyAdvisor() = default;
  // Learn `changes`, in order, and count them in `learnt`, which holds even when it throws half-way.
  virtual void observe(std::span<const PolicyChange> changes, std::size_t& learnt) = 0;
  // Name the next `count` slots to hand out, without forgetting them: the store tells when they are gone.
  virtual std::vector<SlotId> select(std::size_t count) = 0;
};

struct PolicyConfig {
  PolicyKind kind = PolicyKind::Lineage;
  std::array<std::uint32_t, 3> thresholds = {3, 8, 15};  // MultiLru: warm, hot, very hot
  std::shared_ptr<PolicyAdvisor> advisor;                // Advised only
};

// The part of the store that a policy works on. Slots of the pool are [first, first + count).
struct PolicySpace {
  Slot* slots = nullptr;
  SlotId first = 0;
  std::uint32_t count = 0;
  std::array<SlotId, 5> sentinels{};  // for SlotLists
  const FrequencySketch* sketch = nullptr;
};

// All calls come under the store's lock. A slot that is Inactive when inserted is cached; one that is Reset is empty.
// Slots that were never handed out are in the order without having been inserted.
class EvictionPolicy {
 public:
  explicit EvictionPolicy(const PolicySpace& space) noexcept : fresh_(space.first, space.count) {}
  virtual ~EvictionPolicy() = default;

  // Slots that were never handed out: the last ones of the pool.
  std::size_t fresh() const noexcept { return fresh_.size(); }
  // From now on the first `slots` of the pool may be in use. May run out of memory; the other calls need none.
  virtual void grow(std::size_t) {}

  // `slots` have just lost their last reference, in this order.
  virtual void insert(std::span<const SlotId> slots) = 0;
  // `slots`, counted from `first` on, were taken and come back empty and unused: where empty slots are not handed out
  // first, they still are. Their states need not say so.
  virtual void give_back(std::span<const SlotId> slots, SlotId first) {
    for (const SlotId slot : slots) {
      const SlotId id = first + slot;
      insert({&id, 1});
    }
  }
  // `slot` is referenced or reset again; its identity is still in place.
  virtual void remove(SlotId slot) = 0;
  // The same of many that are cached, each once. Their states may say already that they no longer are.
  virtual void remove_cached(std::span<const SlotId> slots) = 0;
  // Bring in what removing `slots` will need. kNoSlot and slots that are not in the order may be among them.
  virtual void warm(std::span<const SlotId>) const {}
  // `slots` were used without being referenced.
  virtual void touch(std::span<const SlotId> slots) = 0;
  // Hand out the next out.size() slots; the caller has checked that there are as many.
  virtual void take(std::span<SlotId> out) = 0;
  // The order in which the next `limit` slots would go. For tests and reports: may cost O(n log n).
  std::vector<SlotId> order(std::size_t limit) const { return list(fresh_, limit); }
  // The same without the fresh ones.
  std::vector<SlotId> order_of_used(std::size_t limit) const { return list({}, limit); }

  virtual std::size_t memory_bytes() const { return 0; }
  std::uint64_t steps() const noexcept { return steps_; }

 protected:
  // The order, if `fresh` were the fresh ones.
  virtual std::vector<SlotId> list(FreshSlots fresh, std::size_t limit) const = 0;

  FreshSlots fresh_;
  std::uint64_t steps_ = 0;  // list and heap operations, so that complexity can be tested
};

// Raises ConfigError for thresholds out of order or a missing advisor.
std::unique_ptr<EvictionPolicy> make_policy(const PolicyConfig& config, const PolicySpace& space);

}  // namespace understudy
