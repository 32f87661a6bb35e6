// Open-addressing map from 64-bit keys to numbers, for keys that are hashes already.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/assert.hpp"

namespace understudy {

class KeyIndex {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  KeyIndex() : entries_(64) {}

  std::size_t size() const noexcept { return size_; }
  // kNone: the key is not there.
  std::uint32_t find(std::uint64_t key) const noexcept { return entries_[place_of(key)].value; }
  // The value of the key, kNone if it is new; valid until the next insert or erase.
  std::uint32_t& insert(std::uint64_t key) {
    if (2 * (size_ + 1) > entries_.size()) grow();
    Entry& entry = entries_[place_of(key)];
    if (entry.value == kNone) {
      entry.key = key;
      ++size_;
    }
    return entry.value;
  }
  std::uint32_t& at(std::uint64_t key) noexcept {
    Entry& entry = entries_[place_of(key)];
    UNDERSTUDY_ASSERT(entry.value != kNone, "the key is in the index");
    return entry.value;
  }
  // Later entries of the run move up, so that lookups end at the first empty place.
  void erase(std::uint64_t key) noexcept {
    std::size_t hole = place_of(key);
    UNDERSTUDY_ASSERT(entries_[hole].value != kNone, "the key is in the index");
    const std::size_t mask = entries_.size() - 1;
    for (std::size_t next = (hole + 1) & mask; entries_[next].value != kNone; next = (next + 1) & mask) {
      const std::size_t distance = (next - home_of(entries_[next].key)) & mask;
      if (distance < ((next - hole) & mask)) continue;
      entries_[hole] = entries_[next];
      hole = next;
    }
    entries_[hole].value = kNone;
    --size_;
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Entry& entry : entries_) {
      if (entry.value != kNone) visit(entry.key);
    }
  }

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t value = kNone;
  };

  std::size_t home_of(std::uint64_t key) const noexcept { return (key ^ (key >> 32)) & (entries_.size() - 1); }
  // Where the key is, or where it would be inserted.
  std::size_t place_of(std::uint64_t key) const noexcept {
    std::size_t place = home_of(key);
    while (entries_[place].value != kNone && entries_[place].key != key) place = (place + 1) & (entries_.size() - 1);
    return place;
  }
  void grow() {
    std::vector<Entry> old = std::exchange(entries_, std::vector<Entry>(2 * entries_.size()));
    for (const Entry& entry : old) {
      if (entry.value != kNone) entries_[place_of(entry.key)] = entry;
    }
  }

  std::vector<Entry> entries_;  // a power of two, at most half full
  std::size_t size_ = 0;
};

}  // namespace understudy
