// Calls that a store rejects.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "store/block_store.hpp"
#include "tests/fail.hpp"

namespace understudy {

// A rejected call, one of three, changes nothing, and its error leaks no memory.
inline void check_refusal(BlockStore& store, std::size_t pool, std::size_t which,
                          std::span<const BlockIdentity> block) {
  const std::string before = store.dump();
  bool refused = false;
  try {
    std::vector<SlotId> slots(store.num_blocks(pool) + 1);
    switch (which) {
      case 0:
        store.allocate(pool, slots);
        break;
      case 1:
        slots.back() = SlotId(store.num_blocks(pool));
        store.release(pool, slots);
        break;
      default:
        slots.assign(2, 0);
        store.stage(pool, slots, block);
        break;
    }
  } catch (const Error&) {
    refused = true;
  }
  if (!refused) fail("a wrong call was accepted");
  if (store.dump() != before) fail("a refused call changed the store");
}

}  // namespace understudy
