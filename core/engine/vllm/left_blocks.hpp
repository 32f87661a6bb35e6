// Blocks of ended and preempted requests that a step in flight, a load or a peer still uses.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

#include "engine/vllm/batch.hpp"
#include "engine/vllm/kept_tables.hpp"

namespace understudy {

struct LeftBlocks {
  std::deque<KeptBlocks> deferred;                    // until a step has ended, in order
  std::unordered_map<RequestId, KeptBlocks> orphans;  // of requests aborted during their load
  KeptTables kept;                                    // of requests that are still to be sent

  std::uint64_t num_deferred() const noexcept {
    std::uint64_t blocks = 0;
    for (const KeptBlocks& of : deferred) blocks += of.table.size();
    return blocks;
  }
  std::uint64_t references() const noexcept {
    std::uint64_t blocks = num_deferred() + kept.references();
    for (const auto& [id, of] : orphans) blocks += of.table.size();
    return blocks;
  }
};

}  // namespace understudy
