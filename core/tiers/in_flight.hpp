// Blocks that are on their way somewhere, by hash.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tokens/lineage_hash.hpp"

namespace understudy {

// Open addressing with linear probing; at most half full. An entry has 32 bits of its key, so that many fit into the
// cache: who brings a block knows the rest.
class InFlight {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // The value of `key`, or kNone. `brings(value)` says whether an entry with that value may be the key's.
  template <typename Brings>
  std::uint32_t find(const LineageHash& key, Brings brings) const {
    if (count_ == 0) return kNone;
    const std::uint32_t tag = tag_of(key);
    for (std::size_t at = home(tag); entries_[at].value != kNone; at = next(at)) {
      if (entries_[at].tag == tag && brings(entries_[at].value)) return entries_[at].value;
    }
    return kNone;
  }

  // Before so many are inserted.
  void make_room(std::size_t more) {
    while (2 * (count_ + more) > entries_.size()) grow();
  }
  // Asks for the memory of a key, some time ahead of its use.
  void warm(const LineageHash& key) const noexcept {
    if (!entries_.empty()) __builtin_prefetch(&entries_[home(tag_of(key))], 1, 3);
  }
  // `key` must be absent, and `value` not kNone; there must be room.
  void insert(const LineageHash& key, std::uint32_t value) noexcept {
    place({tag_of(key), value});
    ++count_;
  }

  // `key` must be present, with `value`. Which of two equal entries goes is all the same.
  void erase(const LineageHash& key, std::uint32_t value) noexcept {
    const std::uint32_t tag = tag_of(key);
    std::size_t hole = home(tag);
    while (entries_[hole].tag != tag || entries_[hole].value != value) hole = next(hole);
    for (std::size_t at = next(hole); entries_[at].value != kNone; at = next(at)) {
      const std::size_t from_home = (at - home(entries_[at].tag)) & mask();
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
    std::uint32_t tag = 0;
    std::uint32_t value = kNone;
  };

  static std::uint32_t tag_of(const LineageHash& key) noexcept {
    return static_cast<std::uint32_t>((key.lo ^ (key.hi * 0x9E3779B97F4A7C15u)) >> 7);
  }
  std::size_t mask() const noexcept { return entries_.size() - 1; }
  std::size_t next(std::size_t at) const noexcept { return (at + 1) & mask(); }
  std::size_t home(std::uint32_t tag) const noexcept { return tag & mask(); }
  void place(const Entry& entry) noexcept {
    std::size_t at = home(entry.tag);
    while (entries_[at].value != kNone) at = next(at);
    entries_[at] = entry;
  }
  void grow() {
    std::vector<Entry> old(entries_.empty() ? 64 : 2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.value != kNone) place(entry);
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace understudy
