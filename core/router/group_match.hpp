// Leading blocks of a prompt that workers with several cache groups can serve, by an index of their keys.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/vllm/groups/kv_group.hpp"
#include "router/prefix_index.hpp"

namespace understudy {

// For one prompt: the hashes of its units of hashing. Results are in these units, on the device.
class GroupMatch {
 public:
  GroupMatch(const PrefixIndex& index, std::span<const std::uint64_t> prompt) : index_(index), prompt_(prompt) {}

  // Leading units that all groups can serve.
  std::uint32_t all(const GroupLayout& layout, PrefixIndex::Member member);
  // Leading blocks of the first group.
  std::uint32_t first(const GroupLayout& layout, PrefixIndex::Member member);

 private:
  // Leading blocks of a group that each member holds.
  const std::vector<std::uint32_t>& runs(const GroupLayout& layout, std::size_t group);

  const PrefixIndex& index_;
  std::span<const std::uint64_t> prompt_;
  std::map<std::pair<std::uint32_t, std::size_t>, std::vector<std::uint32_t>> runs_;  // by units a block, and group
};

}  // namespace understudy
