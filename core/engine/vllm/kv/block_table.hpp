// The blocks that a request holds in a pool of runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/vllm/kv/block_run.hpp"

namespace understudy {

// A run, and the runs that were split off it, as far as these blocks.
struct HeldRun {
  BlockRun* run = nullptr;
  std::uint32_t blocks = 0;
};

// Blocks of one request and group, in order: those with names, then loose ones.
struct BlockTable {
  std::vector<HeldRun> runs;
  std::vector<SlotId> loose;
  std::uint32_t named = 0;  // blocks in `runs`

  std::size_t size() const noexcept { return named + loose.size(); }
  bool empty() const noexcept { return size() == 0; }
  void append_ids(std::vector<SlotId>& out) const;
  // Gives each run of the entries from `from` on an entry of its own.
  void settle(std::size_t from);
};

// The blocks of a request that has left them behind, in its backend's form.
struct KvTable {
  std::vector<SlotId> ids;  // in order, where blocks are kept one by one
  BlockTable runs;

  std::size_t size() const noexcept { return ids.size() + runs.size(); }
  bool empty() const noexcept { return size() == 0; }
  std::vector<SlotId> all_ids() const {
    std::vector<SlotId> out = ids;
    runs.append_ids(out);
    return out;
  }
};

}  // namespace understudy
