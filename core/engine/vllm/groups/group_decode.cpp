// Decode steps that a fast-forward skips, because they change no block of a request.
#include <algorithm>

#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

std::uint64_t round_up(std::uint64_t tokens, std::uint64_t unit) { return (tokens + unit - 1) / unit * unit; }

}  // namespace

bool GroupedBackend::settled(const KvRequest& request) const {
  return std::ranges::all_of(records_[request.slot].groups,
                             [](const GroupTable& table) { return table.tail == Tail::None && !table.checkpoint; });
}

std::uint64_t GroupedBackend::steps_to_change(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  std::uint64_t next = kNever;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.kind == GroupKind::Circular) continue;
    const GroupTable& table = r.groups[g];
    next = std::min({next, std::uint64_t{table.blocks.size()} * group.block_size, next_slide(request, table, group),
                     next_keys(table, group)});
  }
  return next - std::min<std::uint64_t>(next, position);
}

// The position whose step leaves a block behind.
std::uint64_t GroupedBackend::next_slide(const KvRequest& request, const GroupTable& table,
                                         const KvGroup& group) const {
  const std::uint64_t in_flight = config_.async_scheduling ? 1 : 0;
  if (group.kind != GroupKind::Rswa) {
    const std::uint64_t tokens = group.tokens_to_skip((std::uint64_t{table.slid} + 1) * group.block_size);
    return tokens == kNever ? kNever : tokens + in_flight;
  }
  const std::uint64_t first =
      std::max<std::uint64_t>(table.slid, ceil_div(request.spec.prompt_tokens, group.block_size));
  return (first + 1) * group.block_size + group.window + in_flight;
}

// The position whose step fills a block, which may get a key.
std::uint64_t GroupedBackend::next_keys(const GroupTable& table, const KvGroup& group) const {
  if (!config_.enable_prefix_caching || !group.cacheable()) return kNever;
  return tokens_to_key(table, group) - (config_.async_scheduling ? 0 : 1);
}

std::uint64_t GroupedBackend::tokens_to_key(const GroupTable& table, const KvGroup& group) const {
  const std::uint64_t end = (std::uint64_t{table.keyed} + 1) * group.block_size;
  return rounds_keys() ? round_up(end, layout_.scheduler_block) : end;
}

std::uint64_t GroupedBackend::step_cost(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.kind == GroupKind::Circular) continue;
    blocks += ceil_div(std::uint64_t{position} + 1, group.block_size) > r.groups[g].blocks.size();
  }
  return blocks;
}

std::uint64_t GroupedBackend::step_frees(const KvRequest& request, std::uint32_t position) const {
  const Record& r = records_[request.slot];
  const std::uint32_t tokens = position - (config_.async_scheduling ? 1 : 0);
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    const GroupTable& table = r.groups[g];
    const std::size_t end =
        group.kind == GroupKind::Rswa ? table.blocks.size() : group.skipped(tokens) / group.block_size;
    blocks += std::min(end, table.blocks.size()) - std::min<std::size_t>({end, table.blocks.size(), table.slid});
  }
  return blocks;
}

bool GroupedBackend::lists_state(const KvRequest& request, std::uint32_t position) const {
  if (lists_states_ == KeptStates::None) return false;
  const Record& r = records_[request.slot];
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (!group.state() || next_keys(r.groups[g], group) > position) continue;
    const std::uint64_t first = (std::uint64_t{r.groups[g].keyed} + 1) * group.block_size;
    if (lists_states_ == KeptStates::All || first <= request.spec.prompt_tokens) return true;
  }
  return false;
}

KvBackend::Room GroupedBackend::decode(KvRequest& request, std::uint32_t position, std::int64_t now_ns) {
  Record& r = records_[request.slot];
  slide(request, r, position - (config_.async_scheduling ? 1 : 0));
  if (need_all(request, position, position + 1, false, false) > pool_.num_free()) return Room::Short;
  if (tiers_ != nullptr) {
    if (const Room room = reserve(request, r, position + 1, now_ns); room != Room::Taken) return room;
  }
  grow_all(request, r, position + 1);
  remember_keyed(r);
  key(request, position + (config_.async_scheduling ? 0 : 1));
  skip_to(request, position + 1);
  return Room::Taken;
}

void GroupedBackend::skip_to(const KvRequest& request, std::uint32_t computed) {
  Record& r = records_[request.slot];
  r.computed = computed;
  r.computed_before = computed - 1;
  r.computed_earlier = computed - std::min(computed, 2u);
  r.last_tokens = 1;
  r.last_schedule = schedule_;
}

}  // namespace understudy
