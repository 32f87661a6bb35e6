// Leading blocks of a prompt that workers with several cache groups can serve, by an index of their keys.
#pragma once

#include <array>
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
  // On the device; behind them, with blocks of the worker's slower tiers, then also of shared ones (G3, then G4).
  using Units = std::array<std::uint32_t, PrefixIndex::kTiers>;

  GroupMatch(const PrefixIndex& index, std::span<const std::uint64_t> prompt) : index_(index), prompt_(prompt) {}

  // Leading units that all groups can serve, or the first cached one (`all` false). `shared` has tiers that the worker
  // shares with others, as its only member; null: none.
  Units find(const GroupLayout& layout, PrefixIndex::Member member, const PrefixIndex* shared, bool all);

 private:
  // Where a block may be, besides the device.
  struct Below {
    bool own = false;                     // on the member's slower tiers
    const PrefixIndex* shared = nullptr;  // on these tiers, down to `lowest`
    Tier lowest = Tier::G1;
  };
  bool holds(PrefixIndex::Member member, const Below& below, std::uint64_t key) const;
  // Leading blocks of a group that each member holds, by tier.
  const std::vector<std::uint32_t>& runs(const GroupLayout& layout, std::size_t group);
  // Leading blocks of a group that a member holds on the device, or (`any`) on some tier.
  std::uint32_t run(const GroupLayout& layout, std::size_t group, PrefixIndex::Member member, bool any);
  // Leading blocks of a group, some of them perhaps on shared tiers.
  std::uint32_t run(const GroupLayout& layout, std::size_t group, PrefixIndex::Member member, const Below& below);
  std::uint32_t hit(const GroupLayout& layout, PrefixIndex::Member member, const Below& below, bool all);

  const PrefixIndex& index_;
  std::span<const std::uint64_t> prompt_;
  std::map<std::pair<std::uint32_t, std::size_t>, std::vector<std::uint32_t>> runs_;  // by units a block, and group
};

}  // namespace understudy
