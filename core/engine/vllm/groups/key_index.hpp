// Open-addressing map from keys to numbers: an entry has 32 bits of its key's hash, and the owner compares the keys.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/assert.hpp"
#include "base/huge_array.hpp"

namespace understudy {

// Entries take 8 bytes, because random access to the table is bound by memory: eight of them share a cache line.
class KeyIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  KeyIndex() : entries_(std::size_t{1} << kSmallest), shift_(32 - kSmallest) {}

  std::size_t size() const noexcept { return size_; }
  static std::uint32_t tag(std::uint64_t key) noexcept {
    return static_cast<std::uint32_t>((key * 0x9E3779B97F4A7C15u) >> 32);
  }
  // Prefetch the cache line of a key.
  void warm(std::uint32_t tag) const noexcept { __builtin_prefetch(&entries_[home_of(tag)], 1, 3); }
  // A number whose key most probably has that tag; kNone: no key has it.
  std::uint32_t guess(std::uint32_t tag) const noexcept {
    return find(tag, [](std::uint32_t) { return true; });
  }
  // The number of the tag that `same` accepts; kNone: none.
  template <typename Same>
  std::uint32_t find(std::uint32_t tag, Same same) const noexcept {
    for (std::size_t place = home_of(tag); entries_[place].used(); place = after(place)) {
      if (entries_[place].tag == tag && same(entries_[place].value())) return entries_[place].value();
    }
    return kNone;
  }
  // Add a number whose key is not there.
  void insert(std::uint32_t tag, std::uint32_t value) {
    if (2 * (size_ + 1) > entries_.size()) grow();
    place_entry({tag, value + 1});
    ++size_;
  }
  // Replace a number by another one of the same key.
  void replace(std::uint32_t tag, std::uint32_t value, std::uint32_t successor) noexcept {
    entries_[place_of(tag, value)].next_value = successor + 1;
  }
  // Later entries of the run move up, so that lookups end at the first empty place.
  void erase(std::uint32_t tag, std::uint32_t value) noexcept {
    std::size_t hole = place_of(tag, value);
    const std::size_t mask = entries_.size() - 1;
    for (std::size_t next = after(hole); entries_[next].used(); next = after(next)) {
      const std::size_t distance = (next - home_of(entries_[next].tag)) & mask;
      if (distance < ((next - hole) & mask)) continue;
      entries_[hole] = entries_[next];
      hole = next;
    }
    entries_[hole] = {};
    --size_;
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (std::size_t place = 0; place < entries_.size(); ++place) {
      if (entries_[place].used()) visit(entries_[place].value());
    }
  }

 private:
  static constexpr unsigned kSmallest = 6;  // log2 of the entries

  struct Entry {
    std::uint32_t tag;
    std::uint32_t next_value;  // the number + 1; 0: empty, as in new memory

    bool used() const noexcept { return next_value != 0; }
    std::uint32_t value() const noexcept { return next_value - 1; }
  };

  std::size_t home_of(std::uint32_t tag) const noexcept { return tag >> shift_; }
  std::size_t after(std::size_t place) const noexcept { return (place + 1) & (entries_.size() - 1); }
  std::size_t place_of(std::uint32_t tag, std::uint32_t value) const noexcept {
    std::size_t place = home_of(tag);
    while (entries_[place].next_value != value + 1) {
      UNDERSTUDY_ASSERT(entries_[place].used(), "the key is in the index");
      place = after(place);
    }
    return place;
  }
  void place_entry(Entry entry) noexcept {
    std::size_t place = home_of(entry.tag);
    while (entries_[place].used()) place = after(place);
    entries_[place] = entry;
  }
  void grow() {
    HugeArray<Entry> old(2 * entries_.size());
    old.prefer_huge_pages(0, old.size());
    std::swap(old, entries_);
    --shift_;
    for (std::size_t place = 0; place < old.size(); ++place) {
      if (old[place].used()) place_entry(old[place]);
    }
  }

  HugeArray<Entry> entries_;  // a power of two, at most half full
  unsigned shift_;
  std::size_t size_ = 0;
};

}  // namespace understudy
