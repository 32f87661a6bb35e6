// Read-only lookups of many blocks at once in a pool's index.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "store/block_index.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

inline constexpr std::size_t kTagBatch = 16;  // index lines prefetched at once

// Calls visit(i, slot) with the slot that holds block i, or kNoSlot, until it returns false. Prefetches index lines a
// batch ahead and slots a few blocks ahead.
template <typename Visit>
void find_each(BlockIndex& shared, std::span<const BlockIdentity> identities, Visit visit) {
  constexpr std::size_t kGuessAhead = 4;
  std::array<std::uint32_t, kTagBatch> tags;
  std::array<SlotId, kTagBatch> guesses;
  BlockIndex index = shared;  // stays in registers
  const std::size_t count = identities.size();
  const auto prefetch = [&](std::size_t i) {
    tags[i % kTagBatch] = BlockIndex::tag(identities[i].lineage);
    index.warm(tags[i % kTagBatch]);
  };
  const auto guess = [&](std::size_t i) { guesses[i % kTagBatch] = index.guess_and_warm(tags[i % kTagBatch]); };
  for (std::size_t i = 0; i < std::min(kTagBatch, count); ++i) prefetch(i);
  for (std::size_t i = 0; i < std::min(kGuessAhead, count); ++i) guess(i);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kGuessAhead < count) guess(i + kGuessAhead);
    const std::uint32_t tag = tags[i % kTagBatch];
    const SlotId guessed = guesses[i % kTagBatch];
    if (i + kTagBatch < count) prefetch(i + kTagBatch);
    if (!visit(i, index.find(identities[i].lineage, tag, guessed))) break;
  }
  shared = index;  // updates the count of probes
}

// Guesses the slot next to the last one found: blocks stored together are mostly in adjacent slots, up or down.
class NeighbourGuess {
 public:
  // For the pool of slots [first, first + count).
  NeighbourGuess(const Slot* slots, SlotId first, std::uint32_t count) noexcept
      : slots_(slots), first_(first), count_(count) {}

  void found(SlotId id) noexcept {
    step_ = id < last_ && last_ != kNoSlot ? SlotId(-1) : SlotId{1};
    last_ = id;
  }
  // Returns the guessed slot if it holds the key and has no copies, else kNoSlot.
  SlotId find(const LineageHash& lineage) noexcept {
    if (last_ == kNoSlot) return kNoSlot;
    const SlotId id = last_ + step_;
    if (id - first_ >= count_) return kNoSlot;
    const Slot& slot = slots_[id];
    if (!(slot.lineage == lineage) || !slot.registered() || slot.twinned) return kNoSlot;
    return last_ = id;
  }

 private:
  const Slot* slots_;
  SlotId first_;
  std::uint32_t count_;
  SlotId last_ = kNoSlot;
  SlotId step_ = 1;
};

}  // namespace understudy
