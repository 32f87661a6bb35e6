#include "router/group_match.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

namespace {
constexpr std::array kBelow = {Tier::G2, Tier::G3, Tier::G4};
}

const std::vector<std::uint32_t>& GroupMatch::runs(const GroupLayout& layout, std::size_t group) {
  const std::uint32_t units = layout.groups[group].block_size / layout.hash_block;
  const auto [at, fresh] = runs_.try_emplace({units, group});
  if (fresh) {
    std::vector<std::uint64_t> keys;
    for (std::size_t end = units; end <= prompt_.size(); end += units) {
      keys.push_back(group_key(prompt_[end - 1], static_cast<std::uint8_t>(group)));
    }
    index_.match(keys, false, at->second);
  }
  return at->second;
}

bool GroupMatch::has_below(PrefixIndex::Member member) const {
  return std::ranges::any_of(kBelow, [&](Tier tier) { return index_.blocks(member, tier) > 0; });
}

std::uint32_t GroupMatch::run(const GroupLayout& layout, std::size_t group, PrefixIndex::Member member, bool any) {
  const std::uint32_t* const by_tier = &runs(layout, group)[member * PrefixIndex::kTiers];
  const std::uint32_t total = std::accumulate(by_tier, by_tier + PrefixIndex::kTiers, std::uint32_t{0});
  if (any || total == by_tier[0]) return total;
  // A block behind one of a slower tier may be on the device.
  const std::uint32_t units = layout.groups[group].block_size / layout.hash_block;
  std::uint32_t leading = 0;
  while (leading < by_tier[0] &&
         index_.holds(member, Tier::G1,
                      group_key(prompt_[(leading + std::size_t{1}) * units - 1], static_cast<std::uint8_t>(group)))) {
    ++leading;
  }
  return leading;
}

GroupMatch::Units GroupMatch::all(const GroupLayout& layout, PrefixIndex::Member member) {
  const std::uint32_t device = hit(layout, member, false);
  if (!has_below(member)) return {device, 0};
  return {device, std::max(device, hit(layout, member, true)) - device};
}

std::uint32_t GroupMatch::hit(const GroupLayout& layout, PrefixIndex::Member member, bool any) {
  const std::uint32_t unit = layout.hash_block;
  const auto holds = [&](std::uint64_t key) {
    return index_.holds(member, Tier::G1, key) ||
           (any && std::ranges::any_of(kBelow, [&](Tier tier) { return index_.holds(member, tier, key); }));
  };
  const auto present = [&](const std::vector<std::size_t>& kind, std::uint32_t end) {
    const std::uint64_t hash = prompt_[end / unit - 1];
    return std::ranges::all_of(kind,
                               [&](std::size_t g) { return holds(group_key(hash, static_cast<std::uint8_t>(g))); });
  };
  const auto full_run = [&](const std::vector<std::size_t>& kind) {
    std::uint32_t blocks = std::numeric_limits<std::uint32_t>::max();
    for (const std::size_t g : kind) blocks = std::min(blocks, run(layout, g, member, any));
    return blocks * layout.groups[kind.front()].block_size;
  };
  const auto limit = static_cast<std::uint32_t>(prompt_.size() * unit);
  return GroupHit(layout, present, full_run).find(limit) / unit;
}

GroupMatch::Units GroupMatch::first(const GroupLayout& layout, PrefixIndex::Member member) {
  const std::uint32_t units = layout.groups[0].block_size / layout.hash_block;
  const std::uint32_t device = run(layout, 0, member, false);
  return {device * units, (run(layout, 0, member, true) - device) * units};
}

}  // namespace understudy
