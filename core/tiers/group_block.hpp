// Names of the blocks of several KV groups on tiers: content, end and group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "events/event_ring.hpp"

namespace understudy {

// A block that ends with `unit`, as tiers name it: its hash is its key, and positions increase with end, then group.
inline BlockIdentity block_of_group(const BlockIdentity& unit, std::size_t group, std::size_t num_groups) {
  const std::uint64_t key = group_key(unit.sequence_hash(), static_cast<std::uint8_t>(group));
  const std::size_t position = unit.position() * num_groups + group;
  return {LineageHash::make(key, false, 0, static_cast<std::uint32_t>(position)), unit.local_hash, unit.parent_hash};
}

inline std::uint8_t group_of_block(const BlockIdentity& block, std::size_t num_groups) noexcept {
  return static_cast<std::uint8_t>(block.position() % num_groups);
}

// The unit of hashing that ends the block.
inline BlockIdentity unit_of_block(const BlockIdentity& block, std::size_t num_groups) {
  const std::uint64_t content = group_key(block.sequence_hash(), group_of_block(block, num_groups));  // undoes itself
  const auto position = static_cast<std::uint32_t>(block.position() / num_groups);
  return {LineageHash::make(content, position > 0, block.parent_hash, position), block.local_hash, block.parent_hash};
}

// Names the blocks of a tier's rows by unit and group, and makes those of one call an event per group.
inline void split_groups(std::span<EventRecord> rows, std::size_t num_groups) {
  for (std::size_t first = 0, end = 0; first < rows.size(); first = end) {
    do {
      rows[end].group = group_of_block(rows[end].identity, num_groups);
      rows[end].identity = unit_of_block(rows[end].identity, num_groups);
      ++end;
    } while (end < rows.size() && !rows[end].starts && rows[end].kind == rows[first].kind);
    const std::span<EventRecord> call = rows.subspan(first, end - first);
    const std::uint64_t first_id = call.front().id;
    std::ranges::stable_sort(call, {}, &EventRecord::group);
    for (std::size_t i = 0; i < call.size(); ++i) {
      call[i].id = first_id + i;
      call[i].starts = i == 0 || call[i].group != call[i - 1].group;
    }
  }
}

}  // namespace understudy
