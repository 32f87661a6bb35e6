// The rules of kvbm: one physical block a hash, shared by all who want it, and found as soon as it is acquired.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/block_store.hpp"

namespace understudy {

// Over pool 0 of a store. An acquisition is look, hold, store (or undo_hold), with room made in between: for those
// blocks that are `missing`, and for as many without a name as its caller likes.
class SharedBlocks {
 public:
  explicit SharedBlocks(BlockStore& store) : store_(store) {}

  // Where distinct `blocks` are, and how many hold each. Returns how many nobody holds. Changes nothing.
  std::uint64_t look(std::span<const BlockIdentity> blocks);
  std::span<const SlotId> slots() const noexcept { return slots_; }
  std::span<const std::uint32_t> holders() const noexcept { return holders_; }
  std::size_t missing() const noexcept;

  // One reference more to each that is here, so that making room for the others cannot evict it. Only what nobody held
  // counts as used again.
  void hold(std::span<const BlockIdentity> blocks);
  void undo_hold();
  // The rest go to `fresh` slots and are found from now on; `slots` then says where all of them are. `tokens` are those
  // of all `blocks`, where events carry them. Returns how many fresh slots it used: the first ones.
  std::size_t store(std::span<const BlockIdentity> blocks, std::span<SlotId> fresh, std::span<const Token> tokens = {});

  // The block without a name in `slot` becomes `block`, or gives way to the one that is here already.
  void seal(SlotId& slot, const BlockIdentity& block, std::span<const Token> tokens = {});

 private:
  BlockStore& store_;
  std::vector<SlotId> slots_;
  std::vector<std::uint32_t> holders_;
  std::vector<SlotId> held_;  // scratch, and so are the next
  std::vector<BlockIdentity> unheld_;
  std::vector<SlotId> matched_;
};

}  // namespace understudy
