// A slot: the physical place of one block, and the intrusive lists that link slots.
#pragma once

#include <cstdint>

#include "base/assert.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

enum class Tier : std::uint8_t { G1 = 1, G2 = 2, G3 = 3, G4 = 4 };

enum class SlotState : std::uint8_t {
  Reset,      // empty and unreferenced
  Mutable,    // not matchable: written by its one owner, or unregistered but referenced
  Staged,     // complete and hashed, not yet visible to others
  Claimed,    // staged, and its block is on the way: only `locate` finds it
  Primary,    // registered, matchable and referenced
  Duplicate,  // registered and referenced; lookups return its primary, which it keeps alive
  Inactive,   // registered, matchable, unreferenced: cached until evicted
};

// State read at every step of a block's life: two slots per cache line, because the store is bound by memory. Fields
// written and read in quick succession have a byte of their own: a bit-field is read by the word, which stalls.
// `prev`/`next` belong to the pool's eviction policy while the slot is unreferenced.
struct alignas(32) Slot {
  static constexpr std::uint8_t kLodged = 0xFF;  // `lane` of an entry outside its home bucket

  LineageHash lineage;  // meaningful from Staged on
  SlotId prev = kNoSlot;
  SlotId next = kNoSlot;
  std::uint32_t refs = 0;
  SlotState state = SlotState::Reset;
  std::uint8_t lane = kLodged;    // lane in the index bucket, while it has an entry
  bool reset_on_release = false;  // meaningful from Mutable on
  bool twinned : 1 = false;       // the hash has other copies on this tier
  bool marked : 1 = false;        // scratch for all-or-nothing checks; false between calls

  void warm() const noexcept { __builtin_prefetch(this, 1, 3); }  // prefetch, some blocks ahead of use

  bool registered() const noexcept { return state >= SlotState::Primary; }
  bool available() const noexcept { return state == SlotState::Reset || state == SlotState::Inactive; }
};
static_assert(sizeof(Slot) == 32);

// Cold fields of a slot: written with the block, read only by events and copies.
struct SlotDetail {
  std::uint64_t local_hash = 0;  // as in BlockIdentity; meaningful from Staged on
  std::uint64_t parent_hash = 0;
  std::uint64_t generation = 0;  // number of the hash's present residency on this tier; valid once registered
  SlotId twin_prev =
      kNoSlot;  // circular list of the copies of one hash on one tier, earliest first; valid when `twinned`
  SlotId twin_next = kNoSlot;
};
static_assert(sizeof(SlotDetail) == 32);

// Doubly linked list through Slot::prev/next with a sentinel slot, so that unlinking needs no list.
class SlotList {
 public:
  SlotList(Slot* slots, SlotId sentinel) : slots_(slots), sentinel_(sentinel) {
    slots_[sentinel_].prev = slots_[sentinel_].next = sentinel_;
  }

  bool empty() const noexcept { return front() == sentinel_; }
  SlotId front() const noexcept { return slots_[sentinel_].next; }
  SlotId end() const noexcept { return sentinel_; }
  SlotId after(SlotId id) const noexcept { return slots_[id].next; }

  void push_back(SlotId id) noexcept { link(id, slots_[sentinel_].prev, sentinel_); }
  void push_front(SlotId id) noexcept { link(id, sentinel_, slots_[sentinel_].next); }

  // The list must not be empty.
  SlotId pop_front() noexcept {
    const SlotId id = front();
    UNDERSTUDY_ASSERT(id != sentinel_, "pop from an empty slot list");
    unlink(slots_, id);
    return id;
  }

  static void unlink(Slot* slots, SlotId id) noexcept {
    Slot& slot = slots[id];
    UNDERSTUDY_ASSERT(slot.prev != kNoSlot && slot.next != kNoSlot, "unlinks a slot that is in no list");
    UNDERSTUDY_ASSERT(slots[slot.prev].next == id && slots[slot.next].prev == id, "slot list is broken");
    slots[slot.prev].next = slot.next;
    slots[slot.next].prev = slot.prev;
    slot.prev = slot.next = kNoSlot;
  }

 private:
  void link(SlotId id, SlotId before, SlotId after) noexcept {
    slots_[id].prev = before;
    slots_[id].next = after;
    slots_[before].next = id;
    slots_[after].prev = id;
  }

  Slot* slots_;
  SlotId sentinel_;
};

}  // namespace understudy
