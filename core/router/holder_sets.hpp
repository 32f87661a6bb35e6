// Who holds a block: sets of holders, each kept once however many blocks have it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace understudy {

using SetId = std::uint32_t;   // 0: nobody
using Holder = std::uint32_t;  // a member of the index on a tier

// A block of a long prompt is held by the same workers as the one before it, mostly. So a block names a set, and a set
// counts its blocks: a million blocks that 64 workers share cost one set. A set is a few words of 64 members each, by
// tier; it goes with its last block.
class HolderSets {
 public:
  static constexpr std::uint32_t kTiers = 4;  // G1 to G4, the fastest first

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

  // One more block has the set that `from` is with (without) the holder, and one fewer has `from`. `from` itself when
  // that is no change.
  SetId add(SetId from, Holder holder) { return change_again(from, holder, true); }
  SetId drop(SetId from, Holder holder) { return change_again(from, holder, false); }
  // One more block has this set, which somebody's chunks describe (sorted, none empty).
  SetId acquire(std::span<const Chunk> chunks);
  void release(SetId id);

  bool contains(SetId id, Holder holder) const noexcept;
  std::span<const Chunk> chunks(SetId id) const noexcept {
    const Set& set = sets_[id];
    return {set.size == 1 ? &set.one : set.many.get(), set.size};
  }
  // Ids are below this; those without blocks are free.
  std::size_t limit() const noexcept { return sets_.size(); }
  std::uint64_t blocks(SetId id) const noexcept { return sets_[id].blocks; }
  std::size_t count() const noexcept { return count_; }
  std::size_t bytes() const noexcept;

 private:
  static constexpr unsigned kWordBits = 24;
  static constexpr std::size_t kFewest = 64;

  struct Set {
    Chunk one;                      // of size 1, inside
    std::unique_ptr<Chunk[]> many;  // else
    std::uint32_t size = 0;
    std::uint32_t hash = 0;
    std::uint64_t blocks = 0;
  };
  struct Memo {  // the last change, which the next block most probably makes too
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
