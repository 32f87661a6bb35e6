// The one map from (tier, lineage hash) to the earliest slot that carries it.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "huge_array.hpp"
#include "slot.hpp"

namespace understudy {

// Buckets of a cache line each, sized once for the store's slots (at most one entry a slot), so it never rehashes. An
// entry stays where it was put: a full bucket sends newcomers to the next ones and counts them, and a search goes on
// past a bucket only while it has such guests elsewhere. So deletion moves nothing and leaves no tombstone. An entry
// is a 32-bit tag, from which its home follows, and a slot.
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
    std::uint32_t word = buckets_[home(tag)].used;
    asm volatile("" : "+r"(word));
  }

  // The slot that most probably holds the key, if any does.
  SlotId guess(std::uint32_t tag) const noexcept {
    const Bucket& bucket = buckets_[home(tag)];
    const unsigned lanes = matching(bucket.tags, tag) & bucket.used;
    return lanes == 0 ? kNoSlot : bucket.slots[lane_of(lanes)];
  }

  // `guess`, when it came from this tag and nothing has changed since, saves the search.
  SlotId find(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag, SlotId guess) const noexcept {
    if (guess != kNoSlot && holds(guess, lineage, pool)) {
      ++probes_;
      return guess;
    }
    return find(lineage, pool, tag);
  }
  SlotId find(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag) const noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      const Bucket& bucket = buckets_[at];
      for (unsigned lanes = matching(bucket.tags, tag) & bucket.used; lanes != 0; lanes &= lanes - 1) {
        const SlotId slot = bucket.slots[lane_of(lanes)];
        if (holds(slot, lineage, pool)) return slot;
      }
      if (bucket.guests_elsewhere == 0) return kNoSlot;
    }
  }
  SlotId find(const LineageHash& lineage, std::uint8_t pool) const noexcept {
    return find(lineage, pool, tag(lineage, pool));
  }

  // The key of `slot` must be absent.
  void insert(std::uint32_t tag, SlotId slot) noexcept {
    std::size_t at = home(tag);
    for (; buckets_[at].used == kFull; at = next(at), ++probes_) ++buckets_[at].guests_elsewhere;
    Bucket& bucket = buckets_[at];
    const unsigned lane = lane_of(~bucket.used);
    bucket.tags[lane] = tag;
    bucket.slots[lane] = slot;
    bucket.used |= 1u << lane;
    ++count_;
    ++probes_;
  }

  // The key of `slot` must be present and held by `slot`; afterwards `successor` holds it.
  void replace(std::uint32_t tag, SlotId slot, SlotId successor) noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      Bucket& bucket = buckets_[at];
      const unsigned lanes = matching(bucket.slots, slot) & bucket.used;
      if (lanes == 0) continue;
      bucket.slots[lane_of(lanes)] = successor;
      return;
    }
  }

  void erase(std::uint32_t tag, SlotId slot) noexcept {
    for (std::size_t at = home(tag);; at = next(at)) {
      ++probes_;
      Bucket& bucket = buckets_[at];
      const unsigned lanes = matching(bucket.slots, slot) & bucket.used;
      if (lanes != 0) {
        bucket.used &= ~lanes;
        --count_;
        return;
      }
      --bucket.guests_elsewhere;
    }
  }

  std::size_t count() const noexcept { return count_; }
  std::uint64_t probes() const noexcept { return probes_; }
  std::size_t memory_bytes() const noexcept { return buckets_.size() * sizeof(Bucket); }

 private:
  static constexpr std::size_t kLanes = 7;
  static constexpr std::size_t kLoad = 4;  // entries a bucket when every slot has one
  static constexpr std::uint32_t kFull = (1u << kLanes) - 1;

  // The word behind the lanes makes them a round eight, which is what vector units compare; `used` hides it.
  struct alignas(64) Bucket {
    std::array<std::uint32_t, kLanes> tags{};
    std::uint32_t guests_elsewhere = 0;  // entries whose search comes past here
    std::array<SlotId, kLanes> slots{};
    std::uint32_t used = 0;  // a bit a lane
  };
  static_assert(sizeof(Bucket) == 64);

  static unsigned matching(const std::array<std::uint32_t, kLanes>& words, std::uint32_t wanted) noexcept {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < kLanes; ++lane) lanes |= static_cast<unsigned>(words[lane] == wanted) << lane;
    return lanes;
  }
  static unsigned lane_of(unsigned lanes) noexcept { return static_cast<unsigned>(std::countr_zero(lanes)); }

  bool holds(SlotId id, const LineageHash& lineage, std::uint8_t pool) const noexcept {
    const Slot& slot = slots_[id];
    return slot.identity.lineage == lineage && slot.pool == pool;
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
