// Blocks that are on their way somewhere, by hash.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tokens/lineage_hash.hpp"

namespace understudy {

// Open addressing with linear probing; at most half full.
class InFlight {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // The value of `key`, or kNone.
  std::uint32_t find(const LineageHash& key) const noexcept {
    if (count_ == 0) return kNone;
    for (std::size_t at = home(key);; at = next(at)) {
      if (entries_[at].value == kNone || entries_[at].key == key) return entries_[at].value;
    }
  }

  // Before so many are inserted.
  void make_room(std::size_t more) {
    while (2 * (count_ + more) > entries_.size()) grow();
  }
  // Asks for the memory of a key, some blocks ahead of its use. There must be room.
  void warm(const LineageHash& key) const noexcept { __builtin_prefetch(&entries_[home(key)], 1, 3); }
  // `key` must be absent, and `value` not kNone; there must be room.
  void insert(const LineageHash& key, std::uint32_t value) {
    place(key, value);
    ++count_;
  }

  // `key` must be present.
  void erase(const LineageHash& key) noexcept {
    std::size_t hole = home(key);
    while (!(entries_[hole].key == key)) hole = next(hole);
    for (std::size_t at = next(hole); entries_[at].value != kNone; at = next(at)) {
      const std::size_t from_home = (at - home(entries_[at].key)) & mask();
      if (from_home >= ((at - hole) & mask())) {
        entries_[hole] = entries_[at];
        hole = at;
      }
    }
    entries_[hole] = {};
    --count_;
  }

  std::size_t size() const noexcept { return count_; }

 private:
  struct Entry {
    LineageHash key;
    std::uint32_t value = kNone;
  };

  std::size_t mask() const noexcept { return entries_.size() - 1; }
  std::size_t next(std::size_t at) const noexcept { return (at + 1) & mask(); }
  std::size_t home(const LineageHash& key) const noexcept {
    return static_cast<std::size_t>((key.lo ^ (key.hi * 0x9E3779B97F4A7C15u)) >> 7) & mask();
  }
  void place(const LineageHash& key, std::uint32_t value) noexcept {
    std::size_t at = home(key);
    while (entries_[at].value != kNone) at = next(at);
    entries_[at] = {key, value};
  }
  void grow() {
    std::vector<Entry> old(entries_.empty() ? 64 : 2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.value != kNone) place(entry.key, entry.value);
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace understudy
