// Runs of blocks that share their holders.
#pragma once

#include <cstdint>

#include "base/short_list.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

struct PrefixNode;

// The name of a block: its sequence hash, or any number that is equal where the block and all before it are.
using BlockName = std::uint64_t;

// Consecutive blocks of one group that one request has filled, and that have had the same holders since. The last one
// is evicted first.
struct BlockRun {
  ShortList<SlotId> ids;          // in order of position
  PrefixNode* node = nullptr;     // null: without names
  BlockRun* next_copy = nullptr;  // registered later, in the same node
  union {
    BlockRun* before = nullptr;  // in the free queue, while unreferenced
    BlockRun* rest;              // while referenced: the part that a split cut off, which is held by the same requests
  };
  BlockRun* after = nullptr;     // in the free queue
  std::uint32_t first = 0;       // name of the node with which it begins
  std::uint32_t references = 0;  // of every block
  std::uint32_t keepers = 0;     // ended requests among its holders
  std::uint8_t group = 0;
  bool phantom = false;  // named by an allocation that was undone

  std::uint32_t size() const noexcept { return ids.size(); }
  std::uint32_t end() const noexcept { return first + ids.size(); }
};

}  // namespace understudy
