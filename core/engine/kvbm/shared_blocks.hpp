// The rules of kvbm: one physical block per hash, shared by all requests, and matchable as soon as it is acquired.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/block_store.hpp"

namespace understudy {

// Operates on pool 0 of a store. An acquisition is look, hold, store (or undo_hold); in between the caller makes room
// for the `missing` blocks, and for any number of blocks without a name.
class SharedBlocks {
 public:
  explicit SharedBlocks(BlockStore& store) : store_(store) {}

  // Find distinct `blocks` and the references of each. Returns how many are unreferenced. Changes nothing.
  std::uint64_t look(std::span<const BlockIdentity> blocks);
  std::span<const SlotId> slots() const noexcept { return slots_; }
  std::span<const std::uint32_t> holders() const noexcept { return holders_; }
  std::size_t missing() const noexcept;

  // Add one reference to each resident block, so that making room for the others cannot evict it. Only blocks that were
  // unreferenced count as used again.
  void hold(std::span<const BlockIdentity> blocks);
  void undo_hold();
  // Put the missing blocks into `fresh` slots and make them matchable; `slots` then has the slots of all. `tokens` are
  // those of all `blocks`, where events carry them. Returns how many fresh slots it used: the first ones.
  std::size_t store(std::span<const BlockIdentity> blocks, std::span<SlotId> fresh, std::span<const Token> tokens = {});

  // Name the unnamed block in `slot`, or replace it by the resident block of that name.
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
