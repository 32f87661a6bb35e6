// Groups of layers and levels of memory of a KV cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace understudy {

// Layers with the same window have their pages together.
struct TrtLifeCycle {
  std::uint32_t window = 0;  // tokens; 0: full attention
  std::uint32_t group = 0;   // pools that its pages come from
  std::uint32_t layers = 1;
  std::uint32_t shown_window = 0;  // as events name it

  // Blocks [0, stale_end) are outside the window of the next token behind `history` tokens.
  std::uint32_t stale_end(std::uint32_t history, std::uint32_t block_size) const noexcept {
    if (window == 0 || history + 1 < window) return 0;
    return (history + 1 - window) / block_size;
  }
};

struct TrtLayout {
  std::uint32_t tokens_per_block = 32;
  std::vector<TrtLifeCycle> life_cycles;
  std::vector<std::uint64_t> page_bytes;           // by group
  std::vector<std::vector<std::uint32_t>> levels;  // pages by level and group: device, host, disk
  bool has_host = false;                           // else the second level is the disk

  std::size_t num_groups() const noexcept { return page_bytes.size(); }
};

}  // namespace understudy
