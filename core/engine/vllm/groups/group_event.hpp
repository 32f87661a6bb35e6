// A change of keys in a cache of several groups, for KV events.
#pragma once

#include <cstdint>
#include <vector>

#include "tokens/lineage_hash.hpp"

namespace understudy {

struct GroupEvent {
  bool stored = false;
  std::uint8_t group = 0;
  bool has_parent = false;
  std::uint32_t block_size = 0;  // tokens of each named block
  std::uint32_t position = 0;    // first token of the range
  std::uint32_t length = 0;      // tokens of the range, those of unnamed blocks included
  std::uint64_t parent = 0;
  std::uint64_t request = 0;
  std::vector<std::uint64_t> hashes;  // of named blocks
  std::vector<std::uint32_t> ends;    // where they end, in tokens
  std::vector<BlockIdentity> units;   // all units of hashing in the range
};

}  // namespace understudy
