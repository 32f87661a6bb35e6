#include "router/group_match.hpp"

#include <algorithm>
#include <limits>

#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

const std::vector<std::uint32_t>& GroupMatch::runs(const GroupLayout& layout, std::size_t group) {
  const std::uint32_t units = layout.groups[group].block_size / layout.hash_block;
  const auto [at, fresh] = runs_.try_emplace({units, group});
  if (fresh) {
    std::vector<std::uint64_t> keys;
    for (std::size_t end = units; end <= prompt_.size(); end += units) {
      keys.push_back(group_key(prompt_[end - 1], static_cast<std::uint8_t>(group)));
    }
    std::vector<std::uint32_t> by_tier;
    index_.match(keys, false, by_tier);
    for (std::size_t row = 0; row < by_tier.size(); row += PrefixIndex::kTiers) at->second.push_back(by_tier[row]);
  }
  return at->second;
}

std::uint32_t GroupMatch::all(const GroupLayout& layout, PrefixIndex::Member member) {
  const std::uint32_t unit = layout.hash_block;
  const auto present = [&](const std::vector<std::size_t>& kind, std::uint32_t end) {
    const std::uint64_t hash = prompt_[end / unit - 1];
    return std::ranges::all_of(kind, [&](std::size_t g) {
      return index_.holds(member, Tier::G1, group_key(hash, static_cast<std::uint8_t>(g)));
    });
  };
  const auto full_run = [&](const std::vector<std::size_t>& kind) {
    std::uint32_t blocks = std::numeric_limits<std::uint32_t>::max();
    for (const std::size_t g : kind) blocks = std::min(blocks, runs(layout, g)[member]);
    return blocks * layout.groups[kind.front()].block_size;
  };
  const auto limit = static_cast<std::uint32_t>(prompt_.size() * unit);
  return GroupHit(layout, present, full_run).find(limit) / unit;
}

std::uint32_t GroupMatch::first(const GroupLayout& layout, PrefixIndex::Member member) {
  return runs(layout, 0)[member] * (layout.groups[0].block_size / layout.hash_block);
}

}  // namespace understudy
