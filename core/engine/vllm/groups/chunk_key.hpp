// Identity of a chunk in a store with the chunks of several cache groups: the group takes the place of the parent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tokens/lineage_hash.hpp"

namespace understudy {

inline LineageHash chunk_of_group(const LineageHash& block, std::size_t group) {
  return LineageHash::make(block.current(), true, group + 1, block.position());
}

inline std::uint8_t group_of_chunk(const LineageHash& chunk) noexcept {
  return static_cast<std::uint8_t>(chunk.parent_fragment() - 1);
}

}  // namespace understudy
