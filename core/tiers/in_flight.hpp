// Blocks on their way, and which load brings each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/assert.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

// Few loads with consecutive positions are searched by position. The blocks of others are in a table: open addressing
// with linear probing, at most half full. An entry has 32 bits of its key, so that many fit into the cache; the load
// knows the whole key.
class InFlight {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // Adds the blocks (at least one) of load `value`, which is not kNone. They must stay in place until `end`, and no
  // other load may bring any of them. `ascends`: positions increase.
  void begin(std::uint32_t value, std::span<const BlockIdentity> blocks, bool ascends) {
    size_ += blocks.size();
    const std::uint32_t first = blocks.front().position();
    if (ascends && few_.size() < kFew && blocks.back().position() - first + 1 == blocks.size()) {
      few_.push_back({value, first, blocks});
      return;
    }
    while (2 * (count_ + blocks.size()) > entries_.size()) grow();
    for (const BlockIdentity& block : blocks) warm(block.lineage);
    for (const BlockIdentity& block : blocks) place({tag_of(block.lineage), value});
    count_ += blocks.size();
  }
  // Removes the same `blocks`.
  void end(std::uint32_t value, std::span<const BlockIdentity> blocks) noexcept {
    UNDERSTUDY_ASSERT(size_ >= blocks.size(), "more blocks arrive than were in flight");
    size_ -= blocks.size();
    if (const auto one = std::ranges::find(few_, value, &Range::value); one != few_.end()) {
      *one = few_.back();
      few_.pop_back();
      return;
    }
    for (const BlockIdentity& block : blocks) warm(block.lineage);
    for (const BlockIdentity& block : blocks) erase(block.lineage, value);
  }

  // Returns the load that brings `key`, or kNone; `brings(value)` confirms a candidate.
  template <typename Brings>
  std::uint32_t find(const LineageHash& key, Brings brings) const {
    if (!few_.empty()) {
      const std::uint32_t position = key.position();
      for (const Range& range : few_) {
        const std::uint32_t at = position - range.first;  // wraps for positions before the range
        if (at < range.blocks.size() && range.blocks[at].lineage == key) return range.value;
      }
    }
    if (count_ == 0) return kNone;
    const std::uint32_t tag = tag_of(key);
    for (std::size_t at = home(tag); entries_[at].value != kNone; at = next(at)) {
      if (entries_[at].tag == tag && brings(entries_[at].value)) return entries_[at].value;
    }
    return kNone;
  }

  // Prefetches the memory of a key.
  void warm(const LineageHash& key) const noexcept {
    if (!entries_.empty()) __builtin_prefetch(&entries_[home(tag_of(key))], 1, 3);
  }
  bool may_be_cold() const noexcept { return count_ > 0; }
  std::size_t size() const noexcept { return size_; }  // blocks

 private:
  static constexpr std::size_t kFew = 8;
  struct Range {
    std::uint32_t value = kNone;
    std::uint32_t first = 0;  // position
    std::span<const BlockIdentity> blocks;
  };
  struct Entry {
    std::uint32_t tag = 0;
    std::uint32_t value = kNone;
  };

  // Erases the entry of `key` and `value`, which must exist; of equal entries, any one.
  void erase(const LineageHash& key, std::uint32_t value) noexcept {
    UNDERSTUDY_ASSERT(count_ > 0, "erases from an empty table");
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

  std::vector<Range> few_;
  std::vector<Entry> entries_;
  std::size_t count_ = 0;  // of entries
  std::size_t size_ = 0;
};

}  // namespace understudy
