// The one map from (tier, lineage hash) to the earliest slot that carries it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "huge_array.hpp"
#include "slot.hpp"

namespace understudy {

// Buckets of a cache line each, sized once for the store's slots (at most one entry a slot), so it never rehashes. An
// entry stays in the bucket where it was put: a full one sends newcomers to the next ones and counts them, and a search
// goes on past a bucket only while it has such guests elsewhere. So deletion touches one line and leaves no tombstone.
// An entry is a slot and 16 bits of its key's 32-bit tag; the other bits choose the bucket.
class BlockIndex {
 public:
  BlockIndex(const Slot* slots, std::size_t max_entries)
      : slots_(slots), size_(max_entries / kLoad + 1), buckets_(size_) {}

  static std::uint32_t tag(const LineageHash& lineage, std::uint8_t pool) noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product =
        static_cast<Wide>(lineage.lo ^ (0x9E3779B97F4A7C15u + pool)) * (lineage.hi ^ 0xD1B54A32D192ED03u);
    std::uint64_t mixed = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    mixed *= 0xBF58476D1CE4E5B9u;  // a second round, for small hand-made hashes
    return static_cast<std::uint32_t>(mixed >> 32);
  }

  // Bring a key's cache line in, with a real load (see Slot::warm).
  void warm(std::uint32_t tag) const noexcept {
    std::uint32_t word = buckets_[home(tag)].guests_elsewhere;
    asm volatile("" : "+r"(word));
  }

  static constexpr SlotId kAbsent = kNoSlot - 1;  // a guess that is certain: nobody holds the key

  // The slot that most probably holds the key, if any does.
  SlotId guess(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    const Lanes lanes(bucket, mark(tag));
    if (!lanes.empty()) return bucket.slots[lanes.first()];
    return bucket.guests_elsewhere == 0 ? kAbsent : kNoSlot;
  }

  // `guess`, when it came from this tag and nothing has changed since, saves the search.
  SlotId find(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag, SlotId guess) const noexcept {
    if (guess == kAbsent || (guess != kNoSlot && holds(guess, lineage, pool))) {
      ++probes_;
      return guess == kAbsent ? kNoSlot : guess;
    }
    return find(lineage, pool, tag);
  }
  SlotId find(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag) const noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      const Bucket& bucket = buckets_[at];
      for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
        const SlotId slot = bucket.slots[lanes.first()];
        if (holds(slot, lineage, pool)) return slot;
      }
      if (bucket.guests_elsewhere == 0) return kNoSlot;
    }
  }
  SlotId find(const LineageHash& lineage, std::uint8_t pool) const noexcept {
    return find(lineage, pool, tag(lineage, pool));
  }

  // The slot that holds the key of `slot`; when there is none it is `slot` from now on, and the answer is kNoSlot.
  SlotId find_or_insert(std::uint32_t tag, SlotId slot) noexcept {
    const Slot& wanted = slots_[slot];
    const std::size_t first = home(tag);
    if (!might_hold(buckets_[first], tag)) {
      ++probes_;
    } else if (const SlotId holder = find(wanted.lineage, wanted.pool, tag); holder != kNoSlot) {
      return holder;
    }
    std::size_t at = first;
    for (; buckets_[at].used == kLanes; at = next(at), ++probes_) ++buckets_[at].guests_elsewhere;
    Bucket& bucket = buckets_[at];
    const std::size_t lane = bucket.used++;
    bucket.marks[lane] = mark(tag);
    bucket.slots[lane] = slot;
    ++count_;
    return kNoSlot;
  }

  // The key of `slot` must be present and held by `slot`; afterwards `successor` holds it.
  void replace(std::uint32_t tag, SlotId slot, SlotId successor) noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      const std::size_t lane = lane_of(buckets_[at], tag, slot);
      if (lane == kLanes) continue;
      buckets_[at].slots[lane] = successor;
      return;
    }
  }

  void erase(std::uint32_t tag, SlotId slot) noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      Bucket& bucket = buckets_[at];
      const std::size_t lane = lane_of(bucket, tag, slot);
      if (lane == kLanes) {
        --bucket.guests_elsewhere;
        continue;
      }
      const std::size_t last = --bucket.used;
      bucket.marks[lane] = bucket.marks[last];
      bucket.slots[lane] = bucket.slots[last];
      bucket.marks[last] = kFree;
      --count_;
      return;
    }
  }

  std::size_t count() const noexcept { return count_; }
  std::uint64_t probes() const noexcept { return probes_; }
  std::size_t memory_bytes() const noexcept { return buckets_.size() * sizeof(Bucket); }

 private:
  static constexpr std::size_t kLanes = 8;
  static constexpr std::size_t kLoad = 5;  // entries a bucket when every slot has one
  static constexpr std::uint16_t kFree = 0;

  struct alignas(64) Bucket {
    std::array<std::uint16_t, kLanes> marks{};
    std::array<SlotId, kLanes> slots{};
    std::uint32_t guests_elsewhere = 0;  // entries whose search comes past here
    std::uint32_t used = 0;              // lanes, the first ones
  };
  static_assert(sizeof(Bucket) == 64);

  // The lanes of a bucket that carry one mark, found four at a time: a lane's top bit is set when all of its bits
  // agree.
  class Lanes {
   public:
    Lanes(const Bucket& bucket, std::uint16_t mark) noexcept {
      std::array<std::uint64_t, 2> words;
      static_assert(sizeof words == sizeof bucket.marks);
      std::memcpy(words.data(), bucket.marks.data(), sizeof words);
      low_ = agreeing(words[0], mark);
      high_ = agreeing(words[1], mark);
    }

    bool empty() const noexcept { return (low_ | high_) == 0; }
    std::size_t first() const noexcept {
      const int bit = low_ != 0 ? std::countr_zero(low_) : 64 + std::countr_zero(high_);
      return static_cast<std::size_t>(bit) / 16;
    }
    void drop_first() noexcept { (low_ != 0 ? low_ : high_) &= (low_ != 0 ? low_ : high_) - 1; }

   private:
    static std::uint64_t agreeing(std::uint64_t word, std::uint16_t mark) noexcept {
      constexpr std::uint64_t kRest = 0x7FFF7FFF7FFF7FFF;
      const std::uint64_t differences = word ^ (std::uint64_t{0x0001000100010001} * mark);
      return ~(((differences & kRest) + kRest) | differences | kRest);
    }

    std::uint64_t low_;
    std::uint64_t high_;
  };

  static bool might_hold(const Bucket& bucket, std::uint32_t tag) noexcept {
    return bucket.guests_elsewhere != 0 || !Lanes(bucket, mark(tag)).empty();
  }
  static std::uint16_t mark(std::uint32_t tag) noexcept {
    const auto bits = static_cast<std::uint16_t>(tag);
    return bits == kFree ? std::uint16_t{1} : bits;
  }
  static std::size_t lane_of(const Bucket& bucket, std::uint32_t tag, SlotId slot) noexcept {
    for (Lanes lanes(bucket, mark(tag)); !lanes.empty(); lanes.drop_first()) {
      if (bucket.slots[lanes.first()] == slot) return lanes.first();
    }
    return kLanes;
  }

  bool holds(SlotId id, const LineageHash& lineage, std::uint8_t pool) const noexcept {
    const Slot& slot = slots_[id];
    return slot.lineage == lineage && slot.pool == pool;
  }

  std::size_t home(std::uint32_t tag) const noexcept {
    return static_cast<std::size_t>((std::uint64_t{tag} * size_) >> 32);
  }
  std::size_t next(std::size_t at) const noexcept { return at + 1 == size_ ? 0 : at + 1; }

  const Slot* slots_;
  std::size_t size_;
  HugeArray<Bucket> buckets_;
  std::size_t count_ = 0;
  mutable std::uint64_t probes_ = 0;
};

}  // namespace understudy
