#include <algorithm>
#include <numeric>

#include "base/errors.hpp"
#include "engine/vllm/groups/kv_group.hpp"

namespace understudy {

namespace {

void require_group(const KvGroup& group, const GroupSettings& settings) {
  const auto require = [](bool holds, const char* problem) {
    if (!holds) throw Error(ErrorKind::ConfigError, "groups: ", problem);
  };
  require(group.block_size > 0, "block_size must be at least 1");
  require(!(group.slides() || group.kind == GroupKind::Rswa) || group.window >= 2,
          "a window must be at least 2 tokens");
  require(group.kind != GroupKind::ChunkedLocal || (group.chunk > 0 && group.chunk % group.block_size == 0),
          "a chunk must be a multiple of its block_size");
  require(group.kind != GroupKind::State || group.align || !settings.caching,
          "a state group with prefix caching needs mode align");
  require(!group.bounded_replay || group.kind == GroupKind::SlidingWindowMla,
          "bounded_replay is for sliding_window_mla");
  require(group.checkpoint_blocks == 0 || group.checkpoint_alignment > 0, "checkpoint_alignment must be at least 1");
}

std::optional<std::uint32_t> cap_of(const KvGroup& group, std::uint64_t in_flight, std::uint32_t max_model_len) {
  const auto most = [&](std::uint64_t tokens) { return std::min<std::uint64_t>(tokens, max_model_len); };
  if (group.slides()) return ceil_div(most(group.window - 1 + in_flight), group.block_size) + 1;
  if (group.kind == GroupKind::ChunkedLocal) return ceil_div(most(group.chunk + in_flight), group.block_size);
  return std::nullopt;
}

}  // namespace

GroupLayout::GroupLayout(const GroupSettings& settings)
    : groups(settings.groups),
      retention(settings.retention_interval),
      caching(settings.caching),
      max_model_len(settings.max_model_len) {
  if (groups.empty()) throw Error(ErrorKind::ConfigError, "groups: give at least one");
  std::uint64_t common = 1;
  std::uint32_t divisor = 0;
  bool limited = false;
  bool aligned = true;
  for (const KvGroup& group : groups) {
    require_group(group, settings);
    common = std::lcm(common, std::uint64_t{group.block_size});
    if (common > (std::uint64_t{1} << 30)) {
      throw Error(ErrorKind::ConfigError, "groups: the least common multiple of the block sizes exceeds 2^30 tokens");
    }
    if (group.kind == GroupKind::State && !group.align) aligned = false;
    if (group.slides() || group.kind == GroupKind::State) limited = true;
    if (group.state()) has_states = true;
    if (group.bounded_replay) replay = std::max(replay, group.window);
    if (!group.cacheable()) continue;
    divisor = std::gcd(divisor, group.block_size);
    block = block == 0 ? group.block_size : std::min(block, group.block_size);
  }
  if (block == 0) throw Error(ErrorKind::ConfigError, "groups: give at least one group that can be cached");
  scheduler_block = static_cast<std::uint32_t>(common);
  const bool several = groups.size() > 1;
  hash_block = several ? divisor : scheduler_block;
  if (several && settings.prefix_match_unit > 0) hash_block = settings.prefix_match_unit;
  if (several && (!caching || !aligned)) hash_block = scheduler_block;
  for (const KvGroup& group : groups) {
    if (caching && group.cacheable() && group.block_size % hash_block != 0) {
      throw Error(ErrorKind::ConfigError, "prefix_match_unit ", hash_block, " must divide the block size ",
                  group.block_size, " of every group; give a divisor");
    }
  }
  const auto allows_partial = [&](const KvGroup& group) {
    return !group.cacheable() || group.full() || group.kind == GroupKind::State || group.block_size == hash_block;
  };
  partial_hits = several && caching && std::ranges::all_of(groups, allows_partial) &&
                 std::ranges::any_of(groups, [&](const KvGroup& g) { return g.state() && g.block_size > hash_block; });
  hit_unit = partial_hits ? hash_block : scheduler_block;
  if (retention && *retention != 0 && (!limited || *retention % scheduler_block != 0)) {
    throw Error(ErrorKind::ConfigError, "prefix_cache_retention_interval ", *retention, " must be 0",
                limited ? ", or a multiple of " : "; no group has a window or a state, and the blocks are ",
                scheduler_block);
  }
  in_flight = std::uint64_t{settings.max_num_batched_tokens} * (settings.async_scheduling ? 2 : 1);
  for (const KvGroup& group : groups) caps.push_back(cap_of(group, in_flight, max_model_len));
  for (const bool full : {true, false}) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (!groups[g].cacheable() || groups[g].full() != full) continue;
      const auto equal =
          std::ranges::find_if(kinds, [&](const auto& kind) { return groups[kind.front()] == groups[g]; });
      if (equal != kinds.end()) {
        equal->push_back(g);
      } else {
        kinds.push_back({g});
      }
    }
  }
}

std::uint64_t GroupLayout::blocks_per_request(std::uint64_t tokens) const {
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const KvGroup& group = groups[g];
    if (caps[g]) {
      blocks += *caps[g];
    } else if (group.state()) {
      blocks += 2 + group.checkpoint_blocks;
    } else {
      blocks += group.kind == GroupKind::Circular ? 1 : ceil_div(tokens, group.block_size);
    }
  }
  return blocks;
}

std::uint64_t GroupLayout::capacity_tokens(std::uint64_t num_blocks) const {
  const std::uint64_t longest = std::min<std::uint64_t>(max_model_len, num_blocks * scheduler_block);
  return num_blocks * longest / std::max<std::uint64_t>(blocks_per_request(longest), 1);
}

std::uint64_t GroupLayout::most_blocks(std::uint32_t tokens) const {
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const KvGroup& group = groups[g];
    std::uint64_t most = ceil_div(tokens, group.block_size);
    if (caps[g]) most = std::min<std::uint64_t>(most, *caps[g]);
    if (group.state()) most = std::min<std::uint64_t>(most, 2 + group.checkpoint_blocks);
    blocks += group.kind == GroupKind::Circular ? 1 : most;
  }
  return blocks;
}

}  // namespace understudy
