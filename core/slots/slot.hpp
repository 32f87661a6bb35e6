// A slot: the physical place of one block, and the intrusive lists that slots hang in.
#pragma once

#include <cstdint>

#include "tokens/lineage_hash.hpp"

namespace understudy {

enum class Tier : std::uint8_t { G1 = 1, G2 = 2, G3 = 3, G4 = 4 };

enum class SlotState : std::uint8_t {
  Reset,      // empty and unreferenced
  Mutable,    // not matchable: being written by its one owner, or unregistered under its holders
  Staged,     // complete and hashed, not yet visible to others
  Claimed,    // the same, and known to be on its way: only `locate` sees it
  Primary,    // registered, matchable and referenced
  Duplicate,  // registered and referenced; lookups return its primary, which it keeps alive
  Inactive,   // registered, matchable, unreferenced: cached until evicted
};

// What every step of a block's life looks at: two slots to a cache line, since memory is what the store waits for.
// What is written and read in one breath has a byte of its own: bit-fields are read by the word, which has to wait.
// `prev`/`next` belong to the pool's eviction policy while the slot is unreferenced.
struct alignas(32) Slot {
  static constexpr std::uint8_t kLodged = 0xFF;  // a lane: in another bucket than its own

  LineageHash lineage;  // meaningful from Staged on
  SlotId prev = kNoSlot;
  SlotId next = kNoSlot;
  std::uint32_t refs = 0;
  SlotState state = SlotState::Reset;
  std::uint8_t lane = kLodged;    // its place in its bucket of the index, while it has one
  bool reset_on_release = false;  // meaningful from Mutable on
  bool twinned : 1 = false;       // the hash has other copies on this tier
  bool marked : 1 = false;        // scratch for all-or-nothing checks; false between calls

  void warm() const noexcept { __builtin_prefetch(this, 1, 3); }  // ask for its line, some blocks ahead of its use

  bool registered() const noexcept { return state >= SlotState::Primary; }
  bool available() const noexcept { return state == SlotState::Reset || state == SlotState::Inactive; }
};
static_assert(sizeof(Slot) == 32);

// The rest of a slot, which is written with the block and read by events and copies alone.
struct SlotDetail {
  std::uint64_t local_hash = 0;  // as in BlockIdentity; meaningful from Staged on
  std::uint64_t parent_hash = 0;
  std::uint64_t generation = 0;  // of the hash's present residency on this tier; meaningful once registered
  SlotId twin_prev = kNoSlot;  // circular list of the copies of one hash on one tier, earliest first; of twinned slots
  SlotId twin_next = kNoSlot;
};
static_assert(sizeof(SlotDetail) == 32);

// A doubly linked list through Slot::prev/next with a sentinel slot, so that unlinking needs no list.
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

  SlotId pop_front() noexcept {
    const SlotId id = front();
    unlink(slots_, id);
    return id;
  }

  static void unlink(Slot* slots, SlotId id) noexcept {
    Slot& slot = slots[id];
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
