// The blocks that a request holds in a pool of runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/vllm/kv/block_run.hpp"

namespace understudy {

// A run, and the runs that were split off it, as far as these blocks. Without a run: the next loose ones.
struct HeldRun {
  BlockRun* run = nullptr;
  std::uint32_t blocks = 0;
};

// Blocks of one request and group, in order: those that it has left behind, those of `runs`, then loose ones.
struct BlockTable {
  std::vector<HeldRun> runs;
  std::vector<SlotId> loose;  // also those between runs
  std::uint32_t named = 0;    // blocks of the runs
  std::uint32_t gaps = 0;     // loose blocks before the last run
  std::uint32_t skipped = 0;  // leading entries without a block

  std::size_t size() const noexcept { return skipped + named + loose.size(); }
  bool empty() const noexcept { return size() == 0; }
  std::uint32_t end_of_runs() const noexcept { return skipped + named + gaps; }
  void append_ids(std::vector<SlotId>& out) const;
  // Gives each run of the entries from `from` on an entry of its own.
  void settle(std::size_t from);
  // Gives the first run of the entry an entry of its own.
  void settle_one(std::size_t i);
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
