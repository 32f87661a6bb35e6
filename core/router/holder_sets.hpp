// Sets of holders, each stored once and shared by all blocks that have it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/assert.hpp"

namespace understudy {

using SetId = std::uint32_t;   // 0: empty
using Holder = std::uint32_t;  // a member of the index on a tier

// Consecutive blocks of a prompt mostly have the same holders. So a block refers to a set, and a set counts its blocks:
// a million blocks that 64 workers share cost one set. A set is a few words of 64 members each, by tier; it is dropped
// with its last block.
class HolderSets {
 public:
  static constexpr std::uint32_t kTiers = 4;  // G1 to G4, fastest first

  struct Chunk {
    std::uint32_t key = 0;  // tier in the upper bits, word of members in the lower
    std::uint64_t bits = 0;
    bool operator==(const Chunk&) const = default;
    std::uint32_t tier() const noexcept { return key >> kWordBits; }
    std::uint32_t word() const noexcept { return key & ((1u << kWordBits) - 1); }
  };

  static constexpr std::uint32_t kMaxMembers = 1u << 22;
  static Holder holder(std::uint32_t member, std::uint32_t tier) noexcept { return member * kTiers + tier; }
  static std::uint32_t member_of(Holder holder) noexcept { return holder / kTiers; }
  static std::uint32_t tier_of(Holder holder) noexcept { return holder % kTiers; }

  HolderSets() : sets_(1), slots_(kFewest, 0) {}

  // Moves one block from set `from` to the set with (without) the holder. Returns `from` when nothing changes.
  SetId add(SetId from, Holder holder) { return change_again(from, holder, true); }
  SetId drop(SetId from, Holder holder) { return change_again(from, holder, false); }
  // Adds a block to the set with these chunks (sorted, none empty).
  SetId acquire(std::span<const Chunk> chunks);
  void release(SetId id);

  bool contains(SetId id, Holder holder) const noexcept;
  std::span<const Chunk> chunks(SetId id) const noexcept {
    const Set& set = sets_[id];
    return {set.size == 1 ? &set.one : set.many.get(), set.size};
  }
  // Upper bound of ids; ids without blocks are free.
  std::size_t limit() const noexcept { return sets_.size(); }
  std::uint64_t blocks(SetId id) const noexcept { return sets_[id].blocks; }
  std::size_t count() const noexcept { return count_; }
  std::size_t bytes() const noexcept;

 private:
  static constexpr unsigned kWordBits = 24;
  static constexpr std::size_t kFewest = 64;

  struct Set {
    Chunk one;                      // if size is 1
    std::unique_ptr<Chunk[]> many;  // otherwise
    std::uint32_t size = 0;
    std::uint32_t hash = 0;
    std::uint64_t blocks = 0;
  };
  struct Memo {  // last change, which the next block mostly repeats
    SetId from = 0;
    Holder holder = 0;
    SetId to = 0;
    bool adds = false;
    bool valid = false;
  };

  static Chunk chunk_of(Holder holder) noexcept {
    const std::uint32_t member = member_of(holder);
    return {tier_of(holder) << kWordBits | member / 64, std::uint64_t{1} << member % 64};
  }
  static std::uint32_t hash_of(std::span<const Chunk> chunks) noexcept;
  SetId change_again(SetId from, Holder holder, bool adds) {
    if (!memo_.valid || memo_.from != from || memo_.holder != holder || memo_.adds != adds) {
      return change(from, holder, adds);
    }
    const SetId to = memo_.to;
    if (to != 0) ++sets_[to].blocks;
    UNDERSTUDY_ASSERT(from == 0 || sets_[from].blocks > 0, "moves a block out of a set that no block has");
    if (from != 0 && --sets_[from].blocks == 0) leave(from);
    return to;
  }
  SetId change(SetId from, Holder holder, bool adds);
  void enter(SetId id);
  void leave(SetId id);
  void resize(std::size_t slots);

  std::vector<Set> sets_;
  std::vector<SetId> free_;
  std::vector<SetId> slots_;  // by hash, open addressing
  std::size_t count_ = 0;
  Memo memo_;
  std::vector<Chunk> scratch_;
};

}  // namespace understudy
