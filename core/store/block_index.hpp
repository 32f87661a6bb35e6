// A tier's one map from a lineage hash to the earliest slot that carries it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "slots/slot.hpp"

namespace understudy {

// Buckets of a cache line each, for at most one entry a slot in use; it moves to more of them as more slots are. An
// entry stays in the bucket where it was put: a full one sends newcomers to the next ones and counts them, and a search
// goes on past a bucket only while it has such guests elsewhere, of its own kind. So deletion touches one line and
// leaves no tombstone. An entry is a slot and 16 bits of its key's 32-bit tag; the other bits choose the bucket. The
// slot remembers its lane, so that deletion does not search.
//
// The object is a view with two counters; who owns the buckets is the caller. A loop works on a copy, which stays in
// registers, and assigns it back.
class BlockIndex {
 public:
  static constexpr std::size_t kLanes = 8;
  struct alignas(64) Bucket {
    std::array<std::uint16_t, kLanes> marks{};
    std::array<SlotId, kLanes> slots{};
    std::uint32_t guests_elsewhere = 0;  // entries whose search comes past here
    std::uint32_t guest_bits = 0;        // of their tags, forgotten with the last of them
    std::uint32_t taken = 0;             // lanes, a bit each
  };
  static_assert(sizeof(Bucket) == 64);

  static std::size_t num_buckets(std::size_t max_entries) noexcept { return max_entries / kLoad + 1; }
  BlockIndex(Slot* slots, Bucket* buckets, std::size_t size) noexcept
      : slots_(slots), buckets_(buckets), size_(static_cast<std::uint32_t>(size)) {}

  // To `size` other buckets, which are empty. Both stand in the order of tags.
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

  // Ask for a key's cache line, some blocks ahead of its use.
  void warm(std::uint32_t tag) const noexcept { __builtin_prefetch(&buckets_[home(tag)], 1, 3); }

  static constexpr SlotId kAbsent = kNoSlot - 1;  // a guess that is certain: nobody holds the key

  // The slot that most probably holds the key, if any does.
  SlotId guess(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    const Lanes lanes(bucket, mark(tag));
    if (!lanes.empty()) return bucket.slots[lanes.first()];
    return has_guest(bucket, tag) ? kNoSlot : kAbsent;
  }

  // The same, and asks for its line.
  SlotId guess_and_warm(std::uint32_t tag) const noexcept {
    const SlotId slot = guess(tag);
    if (slot < kAbsent) slots_[slot].warm();
    return slot;
  }

  // `guess`, when it came from this tag and nothing has changed since, saves the search.
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
  // The slot that claims the key, which nobody needs to hold.
  SlotId find_claim(const LineageHash& lineage, std::uint32_t tag) const noexcept {
    return find_where(tag, [&](SlotId slot) { return claims(slot, lineage); });
  }
  SlotId find(const LineageHash& lineage) const noexcept { return find(lineage, tag(lineage)); }

  bool holds_or_claims(const LineageHash& lineage, std::uint32_t tag) const noexcept {
    return might_hold(tag) && (find(lineage, tag) != kNoSlot || find_claim(lineage, tag) != kNoSlot);
  }
  // False: nobody holds or claims such a key.
  bool might_hold(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    return has_guest(bucket, tag) || !Lanes(bucket, mark(tag)).empty();
  }

  // The slot that holds the key of `slot`; when there is none it is `slot` from now on, and the answer is kNoSlot.
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

  // An entry for the key of `slot`, whoever else may have one.
  [[gnu::always_inline]] void insert(std::uint32_t tag, SlotId slot) noexcept {
    const std::size_t first = home(tag);
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

  // The key of `slot` must be present and held by `slot`; afterwards `successor` holds it.
  void replace(std::uint32_t tag, SlotId slot, SlotId successor) noexcept {
    std::size_t at = home(tag);
    const std::uint32_t lane = lane_of(at, slot, [](Bucket&) {});
    buckets_[at].slots[lane] = successor;
    slots_[successor].lane = slots_[slot].lane;
  }

  [[gnu::always_inline]] void erase(std::uint32_t tag, SlotId slot) noexcept {
    std::size_t at = home(tag);
    const std::uint32_t lane = lane_of(at, slot, [](Bucket& passed) {
      if (--passed.guests_elsewhere == 0) passed.guest_bits = 0;
    });
    buckets_[at].marks[lane] = kFree;
    buckets_[at].taken &= ~(1u << lane);
    --count_;
  }

  std::size_t count() const noexcept { return count_; }
  std::uint64_t probes() const noexcept { return probes_; }

 private:
  static constexpr std::size_t kLoad = 4;  // entries a bucket when every slot has one
  static constexpr std::uint16_t kFree = 0;
  static constexpr std::uint32_t kFull = (1u << kLanes) - 1;

  // The lanes of a bucket that carry one mark, all compared at once.
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

    // Bit 16 i for lane i and bit 16 i + 1 for lane i + 4: one word, so that nothing has to guess which half.
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
  // The lane that holds `slot`, and its bucket in `at`, which starts as its home.
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
