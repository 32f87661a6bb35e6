// The one map from (tier, lineage hash) to the earliest slot that carries it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "huge_array.hpp"
#include "slot.hpp"

namespace understudy {

// Open addressing with linear probing and backward-shift deletion. Sized once for the store's slots (at most one
// entry a slot), so it never rehashes. An entry is a 32-bit tag, from which its home follows, and a slot.
class BlockIndex {
 public:
  BlockIndex(const Slot* slots, std::size_t max_entries) : slots_(slots), size_(2 * max_entries + 8), entries_(size_) {}

  static std::uint32_t tag(const LineageHash& lineage, std::uint8_t pool) noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product =
        static_cast<Wide>(lineage.lo ^ (0x9E3779B97F4A7C15u + pool)) * (lineage.hi ^ 0xD1B54A32D192ED03u);
    std::uint64_t mixed = static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
    mixed *= 0xBF58476D1CE4E5B9u;  // a second round, for small hand-made hashes
    return static_cast<std::uint32_t>(mixed >> 32);
  }

  // Bring a key's cache line in, and return the slot that probably holds it. A real load: several of them, issued
  // back to back, overlap their misses even where prefetch hints are ignored.
  SlotId warm(std::uint32_t tag) const noexcept {
    SlotId slot = entries_[home(tag)].slot;
    asm volatile("" : "+r"(slot));
    return slot;
  }

  SlotId find(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag) const noexcept {
    return place(lineage, pool, tag).slot;
  }
  SlotId find(const LineageHash& lineage, std::uint8_t pool) const noexcept {
    return find(lineage, pool, tag(lineage, pool));
  }

  // Where the key is (`slot` then holds it) or would go, valid until the next change.
  struct Place {
    std::size_t at;
    SlotId slot;
  };
  Place place(const LineageHash& lineage, std::uint8_t pool, std::uint32_t tag) const noexcept {
    std::size_t probes = 1;
    for (std::size_t at = home(tag);; at = next(at), ++probes) {
      const Entry entry = entries_[at];
      if (entry.slot != kNoSlot) {
        if (entry.tag != tag) continue;
        const Slot& slot = slots_[entry.slot];
        if (slot.identity.lineage != lineage || slot.pool != pool) continue;
      }
      probes_ += probes;
      return {at, entry.slot};
    }
  }

  // `place` must have found the key absent.
  void insert(Place place, std::uint32_t tag, SlotId slot) noexcept {
    entries_[place.at] = {tag, slot};
    ++count_;
  }

  // The key of `slot` must be present and held by `slot`; afterwards `successor` holds it.
  void replace(std::uint32_t tag, SlotId slot, SlotId successor) noexcept {
    entries_[locate_slot(tag, slot)].slot = successor;
  }

  void erase(std::uint32_t tag, SlotId slot) noexcept {
    std::size_t hole = locate_slot(tag, slot);
    std::size_t probes = 0;
    for (std::size_t at = next(hole); entries_[at].slot != kNoSlot; at = next(at), ++probes) {
      // An entry may fill the hole unless its home lies cyclically in (hole, at].
      const std::size_t from_home = distance(home(entries_[at].tag), at);
      if (from_home >= distance(hole, at)) {
        entries_[hole] = entries_[at];
        hole = at;
      }
    }
    entries_[hole].slot = kNoSlot;
    probes_ += probes;
    --count_;
  }

  std::size_t count() const noexcept { return count_; }
  std::uint64_t probes() const noexcept { return probes_; }
  std::size_t memory_bytes() const noexcept { return entries_.size() * sizeof(Entry); }

 private:
  struct Entry {
    std::uint32_t tag = 0;
    SlotId slot = kNoSlot;
  };

  std::size_t home(std::uint32_t tag) const noexcept {
    return static_cast<std::size_t>((std::uint64_t{tag} * size_) >> 32);
  }
  std::size_t next(std::size_t at) const noexcept { return at + 1 == size_ ? 0 : at + 1; }
  std::size_t distance(std::size_t from, std::size_t to) const noexcept {
    return to >= from ? to - from : to + size_ - from;
  }

  std::size_t locate_slot(std::uint32_t tag, SlotId slot) const noexcept {
    std::size_t at = home(tag);
    std::size_t probes = 1;
    for (; entries_[at].slot != slot; ++probes) at = next(at);
    probes_ += probes;
    return at;
  }

  const Slot* slots_;
  std::size_t size_;
  HugeArray<Entry> entries_;
  std::size_t count_ = 0;
  mutable std::uint64_t probes_ = 0;
};

}  // namespace understudy
