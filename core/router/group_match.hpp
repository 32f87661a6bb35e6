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

// For one prompt: the hashes of its units of hashing. Results are in these units.
class GroupMatch {
 public:
  struct Units {
    std::uint32_t device = 0;
    std::uint32_t below = 0;  // behind them, with blocks of slower tiers
  };

  GroupMatch(const PrefixIndex& index, std::span<const std::uint64_t> prompt) : index_(index), prompt_(prompt) {}

  // Leading units that all groups can serve.
  Units all(const GroupLayout& layout, PrefixIndex::Member member);
  // Leading units of the first group.
  Units first(const GroupLayout& layout, PrefixIndex::Member member);

 private:
  // Leading blocks of a group that each member holds, by tier.
  const std::vector<std::uint32_t>& runs(const GroupLayout& layout, std::size_t group);
  // Leading blocks of a group that a member holds on the device, or (`any`) on some tier.
  std::uint32_t run(const GroupLayout& layout, std::size_t group, PrefixIndex::Member member, bool any);
  std::uint32_t hit(const GroupLayout& layout, PrefixIndex::Member member, bool any);
  bool has_below(PrefixIndex::Member member) const;

  const PrefixIndex& index_;
  std::span<const std::uint64_t> prompt_;
  std::map<std::pair<std::uint32_t, std::size_t>, std::vector<std::uint32_t>> runs_;  // by units a block, and group
};

}  // namespace understudy
