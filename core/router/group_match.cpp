#include "router/group_match.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

namespace {
constexpr std::array kBelow = {Tier::G2, Tier::G3, Tier::G4};
constexpr std::array kShared = {Tier::G3, Tier::G4};
}  // namespace

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

bool GroupMatch::holds(PrefixIndex::Member member, const Below& below, std::uint64_t key) const {
  if (index_.holds(member, Tier::G1, key)) return true;
  if (below.own && std::ranges::any_of(kBelow, [&](Tier tier) { return index_.holds(member, tier, key); })) return true;
  return below.shared != nullptr && std::ranges::any_of(kShared, [&](Tier tier) {
           return tier <= below.lowest && below.shared->holds(0, tier, key);
         });
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

std::uint32_t GroupMatch::run(const GroupLayout& layout, std::size_t group, PrefixIndex::Member member,
                              const Below& below) {
  const std::size_t units = layout.groups[group].block_size / layout.hash_block;
  std::uint32_t blocks = run(layout, group, member, below.own);
  if (below.shared == nullptr) return blocks;
  for (std::size_t end = (blocks + 1) * units; end <= prompt_.size(); end += units, ++blocks) {
    if (!holds(member, below, group_key(prompt_[end - 1], static_cast<std::uint8_t>(group)))) break;
  }
  return blocks;
}

GroupMatch::Units GroupMatch::find(const GroupLayout& layout, PrefixIndex::Member member, const PrefixIndex* shared,
                                   bool all) {
  Units out{};
  if (!layout.caching) return out;
  std::uint32_t longest = out[0] = hit(layout, member, {}, all);
  const auto extend = [&](std::size_t column, const Below& below) {
    const std::uint32_t length = std::max(longest, hit(layout, member, below, all));
    out[column] = length - longest;
    longest = length;
  };
  const bool own = std::ranges::any_of(kBelow, [&](Tier tier) { return index_.blocks(member, tier) > 0; });
  if (own) extend(1, {.own = true});
  for (const Tier tier : kShared) {
    if (shared == nullptr || shared->blocks(0, tier) == 0) continue;
    extend(tier == Tier::G3 ? 2 : 3, {.own = own, .shared = shared, .lowest = tier});
  }
  return out;
}

std::uint32_t GroupMatch::hit(const GroupLayout& layout, PrefixIndex::Member member, const Below& below, bool all) {
  const std::uint32_t unit = layout.hash_block;
  if (!all) {
    const std::size_t first = layout.first_cached();
    if (first == layout.groups.size()) return 0;
    return run(layout, first, member, below) * (layout.groups[first].block_size / unit);
  }
  const auto present = [&](const std::vector<std::size_t>& kind, std::uint32_t end) {
    const std::uint64_t hash = prompt_[end / unit - 1];
    return std::ranges::all_of(
        kind, [&](std::size_t g) { return holds(member, below, group_key(hash, static_cast<std::uint8_t>(g))); });
  };
  const auto full_run = [&](const std::vector<std::size_t>& kind) {
    std::uint32_t blocks = std::numeric_limits<std::uint32_t>::max();
    for (const std::size_t g : kind) blocks = std::min(blocks, run(layout, g, member, below));
    return blocks * layout.groups[kind.front()].block_size;
  };
  const auto limit = static_cast<std::uint32_t>(prompt_.size() * unit);
  return GroupHit(layout, present, full_run).find(limit) / unit;
}

}  // namespace understudy
