// The only map of a tier from a lineage hash to the earliest slot that holds it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/assert.hpp"
#include "slots/slot.hpp"

namespace understudy {

// Hash table of buckets, one cache line each, with at most one entry per slot in use; it grows with them. An entry
// never moves: a full bucket sends new entries to the next ones and counts them as its guests elsewhere, and a search
// continues past a bucket only while it has such guests with a matching bit. So deletion touches one line and leaves no
// tombstone. An entry is a slot and 16 bits of its key's 32-bit tag; the other bits choose the bucket.
//
// The object is a view with two counters; the caller owns the buckets. A loop works on a copy, which stays in
// registers, and assigns it back.
class BlockIndex {
 public:
  static constexpr std::size_t kLanes = 8;
  struct alignas(64) Bucket {
    std::array<std::uint16_t, kLanes> marks{};
    std::array<SlotId, kLanes> slots{};
    std::uint32_t guests_elsewhere = 0;  // entries whose search passes here
    std::uint32_t guest_bits = 0;        // bits of their tags; cleared with the last of them
    std::uint32_t taken = 0;             // bit set of used lanes
  };
  static_assert(sizeof(Bucket) == 64);

  static std::size_t num_buckets(std::size_t max_entries) noexcept { return max_entries / kLoad + 1; }
  BlockIndex(Slot* slots, Bucket* buckets, std::size_t size) noexcept
      : slots_(slots), buckets_(buckets), size_(static_cast<std::uint32_t>(size)) {}

  // Moves all entries to `size` empty buckets. Both arrays are in tag order.
  void move_to(Bucket* buckets, std::size_t size) noexcept {
    constexpr std::size_t kAhead = 4;  // buckets
    const Bucket* const old = buckets_;
    const std::size_t old_size = size_;
    buckets_ = buckets;
    size_ = static_cast<std::uint32_t>(size);
    count_ = 0;
    for (std::size_t at = 0; at < old_size; ++at) {
      if (at + kAhead < old_size) each(old[at + kAhead], [&](SlotId slot) { slots_[slot].warm(); });
      each(old[at], [&](SlotId slot) { insert(tag(slots_[slot].lineage), slot); });
    }
  }

  static std::uint32_t tag(const LineageHash& lineage) noexcept {
    const std::uint64_t mixed = lineage.lo * 0x9E3779B97F4A7C15u + lineage.hi * 0xD1B54A32D192ED03u;
    return static_cast<std::uint32_t>(mixed >> 32);
  }

  // Prefetches the cache line of a key.
  void warm(std::uint32_t tag) const noexcept { __builtin_prefetch(&buckets_[home(tag)], 1, 3); }

  static constexpr SlotId kAbsent = kNoSlot - 1;  // a certain guess: no slot holds the key

  // Returns the slot that most probably holds the key, if any does.
  SlotId guess(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    const Lanes lanes(bucket, mark(tag));
    if (!lanes.empty()) return bucket.slots[lanes.first()];
    return has_guest(bucket, tag) ? kNoSlot : kAbsent;
  }

  // Guesses and prefetches the slot.
  SlotId guess_and_warm(std::uint32_t tag) const noexcept {
    const SlotId slot = guess(tag);
    if (slot < kAbsent) slots_[slot].warm();
    return slot;
  }

  // Finds the slot of a key; a `guess` for this tag, with no change since, saves the search.
  SlotId find(const LineageHash& lineage, std::uint32_t tag, SlotId guess) const noexcept {
    if (guess == kAbsent || (guess != kNoSlot && holds(guess, lineage))) {
      ++probes_;
      return guess == kAbsent ? kNoSlot : guess;
    }
    return find(lineage, tag);
  }
  SlotId find(const LineageHash& lineage, std::uint32_t tag) const noexcept {
    return find_where(tag, [&](SlotId slot) { return holds(slot, lineage); });
  }
  // Finds the slot that claims the key, which need not be registered.
  SlotId find_claim(const LineageHash& lineage, std::uint32_t tag) const noexcept {
    return find_where(tag, [&](SlotId slot) { return claims(slot, lineage); });
  }
  SlotId find(const LineageHash& lineage) const noexcept { return find(lineage, tag(lineage)); }

  bool holds_or_claims(const LineageHash& lineage, std::uint32_t tag) const noexcept {
    return might_hold(tag) && (find(lineage, tag) != kNoSlot || find_claim(lineage, tag) != kNoSlot);
  }
  // False: no slot holds or claims such a key.
  bool might_hold(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    return has_guest(bucket, tag) || !Lanes(bucket, mark(tag)).empty();
  }

  // Returns the slot that holds the key of `slot`; if there is none, inserts `slot` and returns kNoSlot.
  SlotId find_or_insert(std::uint32_t tag, SlotId slot) noexcept {
    const Slot& wanted = slots_[slot];
    if (!might_hold(tag)) {
      ++probes_;
    } else if (const SlotId holder = find(wanted.lineage, tag); holder != kNoSlot) {
      return holder;
    }
    insert(tag, slot);
    return kNoSlot;
  }

  // Adds an entry for the key of `slot`, even if there is another one.
  // The table never fills up: it has kLanes / kLoad places per slot in use.
  [[gnu::always_inline]] void insert(std::uint32_t tag, SlotId slot) noexcept {
    const std::size_t first = home(tag);
    UNDERSTUDY_ASSERT(count_ < std::size_t{size_} * kLanes, "inserts into a full index");
    std::size_t at = first;
    for (; buckets_[at].taken == kFull; at = next(at), ++probes_) {
      ++buckets_[at].guests_elsewhere;
      buckets_[at].guest_bits |= guest_bit(tag);
    }
    Bucket& bucket = buckets_[at];
    const auto lane = static_cast<std::uint32_t>(std::countr_one(bucket.taken));
    bucket.taken |= 1u << lane;
    bucket.marks[lane] = mark(tag);
    bucket.slots[lane] = slot;
    slots_[slot].lane = at == first ? static_cast<std::uint8_t>(lane) : Slot::kLodged;
    ++count_;
  }

  // Makes `successor` the holder of the key that `slot` holds.
  void replace(std::uint32_t tag, SlotId slot, SlotId successor) noexcept {
    std::size_t at = home(tag);
    const std::uint32_t lane = lane_of(at, slot, [](Bucket&) {});
    buckets_[at].slots[lane] = successor;
    slots_[successor].lane = slots_[slot].lane;
  }

  [[gnu::always_inline]] void erase(std::uint32_t tag, SlotId slot) noexcept {
    std::size_t at = home(tag);
    const std::uint32_t lane = lane_of(at, slot, [](Bucket& passed) {
      UNDERSTUDY_ASSERT(passed.guests_elsewhere > 0, "a bucket has lost count of its guests");
      if (--passed.guests_elsewhere == 0) passed.guest_bits = 0;
    });
    UNDERSTUDY_ASSERT((buckets_[at].taken >> lane & 1) != 0 && buckets_[at].slots[lane] == slot,
                      "erases an entry that the index does not have");
    buckets_[at].marks[lane] = kFree;
    buckets_[at].taken &= ~(1u << lane);
    --count_;
  }

  std::size_t count() const noexcept { return count_; }
  std::uint64_t probes() const noexcept { return probes_; }

 private:
  static constexpr std::size_t kLoad = 4;  // entries per bucket when every slot has one
  static constexpr std::uint16_t kFree = 0;
  static constexpr std::uint32_t kFull = (1u << kLanes) - 1;

  // Lanes of a bucket with one mark, all compared at once.
  class Lanes {
   public:
    Lanes(const Bucket& bucket, std::uint16_t mark) noexcept {
      Marks marks;
      static_assert(sizeof marks == sizeof bucket.marks);
      std::memcpy(&marks, bucket.marks.data(), sizeof marks);
      const auto agreeing = marks == mark;
      std::array<std::uint64_t, 2> words;
      std::memcpy(words.data(), &agreeing, sizeof words);
      lanes_ = (words[0] & 0x0001000100010001) | (words[1] & 0x0002000200020002);
    }

    bool empty() const noexcept { return lanes_ == 0; }
    std::size_t first() const noexcept {
      const auto bit = static_cast<std::size_t>(std::countr_zero(lanes_));
      return bit / 16 + bit % 16 * 4;
    }
    void drop_first() noexcept { lanes_ &= lanes_ - 1; }

   private:
    using Marks [[gnu::vector_size(2 * kLanes)]] = std::uint16_t;

    // Bit 16 i for lane i and bit 16 i + 1 for lane i + 4: one word, so that no branch depends on the half.
    std::uint64_t lanes_;
  };

  template <typename Visit>
  static void each(const Bucket& bucket, Visit visit) {
    for (std::uint32_t left = bucket.taken; left != 0; left &= left - 1) {
      visit(bucket.slots[static_cast<std::size_t>(std::countr_zero(left))]);
    }
  }

  static std::uint32_t guest_bit(std::uint32_t tag) noexcept { return 1u << (tag & 31); }
  static bool has_guest(const Bucket& bucket, std::uint32_t tag) noexcept {
    return (bucket.guest_bits & guest_bit(tag)) != 0;
  }
  static std::uint16_t mark(std::uint32_t tag) noexcept {
    const auto bits = static_cast<std::uint16_t>(tag);
    return bits == kFree ? std::uint16_t{1} : bits;
  }
  // Returns the lane of `slot`, and its bucket in `at`, which starts as the key's home.
  template <typename Pass>
  std::uint32_t lane_of(std::size_t& at, SlotId slot, Pass pass) noexcept {
    ++probes_;
    if (slots_[slot].lane != Slot::kLodged) return slots_[slot].lane;
    for (;; ++probes_) {
      pass(buckets_[at]);
      at = next(at);
      const Bucket& bucket = buckets_[at];
      for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
        if (bucket.slots[lane] == slot && bucket.marks[lane] != kFree) return lane;
      }
    }
  }

  bool holds(SlotId id, const LineageHash& lineage) const noexcept {
    const Slot& slot = slots_[id];
    return slot.lineage == lineage && slot.registered();
  }
  bool claims(SlotId id, const LineageHash& lineage) const noexcept {
    const Slot& slot = slots_[id];
    return slot.lineage == lineage && slot.state == SlotState::Claimed;
  }
  template <typename Accept>
  SlotId find_where(std::uint32_t tag, Accept accept) const noexcept {
    std::size_t at = home(tag);
    do {
      ++probes_;
      const Bucket& bucket = buckets_[at];
      for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
        if (const SlotId slot = bucket.slots[lanes.first()]; accept(slot)) return slot;
      }
      if (!has_guest(bucket, tag)) return kNoSlot;
      at = next(at);
    } while (at != home(tag));  // every bucket may have guests elsewhere
    return kNoSlot;
  }

  std::size_t home(std::uint32_t tag) const noexcept {
    return static_cast<std::size_t>((std::uint64_t{tag} * size_) >> 32);
  }
  std::size_t next(std::size_t at) const noexcept { return at + 1 == size_ ? 0 : at + 1; }

  Slot* slots_;
  Bucket* buckets_;
  std::uint32_t size_;
  std::size_t count_ = 0;
  mutable std::uint64_t probes_ = 0;
};

}  // namespace understudy
