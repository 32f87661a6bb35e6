#include "engine/vllm/groups/block_groups.hpp"

#include <algorithm>

#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

namespace {

// Whether a hit may end inside a block of some group, which is then copied.
bool may_copy(const GroupLayout& layout) {
  return layout.has_states || std::ranges::any_of(layout.groups, [&](const KvGroup& group) {
           return group.kind == GroupKind::ChunkedLocal || group.block_size != layout.groups.front().block_size;
         });
}

}  // namespace

BlockGroups::BlockGroups(const VllmConfig& config)
    : GroupedBackend(config),
      pool_(config.num_gpu_blocks, (config.events || config.check) && config.enable_prefix_caching),
      hits_(layout_.groups.size()) {
  if (may_copy(layout_) || config.offload || config.transfer) held_blocks_.count_tables(config.num_gpu_blocks);
}

void BlockGroups::begin_schedule() {
  GroupedBackend::begin_schedule();
  pool_.begin_schedule();
  copies_.clear();
}

void BlockGroups::end_schedule() {
  if (!ordered_.empty()) pool_.release(end_schedule_later());
}

std::vector<SlotId> BlockGroups::end_schedule_later() {
  std::vector<SlotId> blocks;
  std::ranges::stable_sort(ordered_, {}, &Copy::group);
  for (const Copy& copy : ordered_) {
    copies_.emplace_back(copy.from, copy.to);
    blocks.push_back(copy.from);
    blocks.push_back(copy.to);
  }
  ordered_.clear();
  return blocks;
}

// ── Watch ──

PoolMetrics BlockGroups::metrics() const {
  PoolMetrics m;
  m.total_blocks = pool_.num_blocks();
  m.reset_blocks = pool_.num_free() - pool_.num_cached();
  m.inactive_blocks = pool_.num_cached();
  m.active_blocks = pool_.num_blocks() - pool_.num_free();
  m.evictions = pool_.evictions();
  m.registrations = pool_.registrations();
  return m;
}

std::uint64_t BlockGroups::num_held(const GroupTable& table, std::size_t g) const {
  const KvGroup& group = layout_.groups[g];
  if (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) return table.blocks.size();  // no entry is null
  std::size_t first = group.full() ? 0 : table.slid;              // leading entries are null
  if (group.slides() || group.kind == GroupKind::ChunkedLocal) {  // and none behind them
    while (first < table.blocks.size() && table.blocks[first] == kNoSlot) ++first;
    return table.blocks.size() - first;
  }
  return static_cast<std::uint64_t>(std::count_if(table.blocks.begin() + static_cast<std::ptrdiff_t>(first),
                                                  table.blocks.end(), [](SlotId block) { return block != kNoSlot; }));
}

std::uint32_t BlockGroups::cached(std::span<const BlockIdentity> units) const {
  if (!config_.enable_prefix_caching) return 0;
  const auto present = [&](const std::vector<std::size_t>& kind, std::uint32_t end) {
    return std::ranges::all_of(kind, [&](std::size_t g) { return pool_.find(key_of(units, g, end)) != kNoSlot; });
  };
  const auto limit = static_cast<std::uint32_t>(units.size() * layout_.hash_block);
  const auto full_run = [&](const std::vector<std::size_t>& kind) {
    const std::uint32_t block = layout_.groups[kind.front()].block_size;
    std::uint32_t length = 0;
    while (length + block <= limit && present(kind, length + block)) length += block;
    return length;
  };
  return GroupHit(layout_, present, full_run).find(limit);
}

// ── Room for blocks that a host loads, and what a request leaves behind meanwhile ──

void BlockGroups::truncate(KvHit& hit, std::uint32_t tokens) {
  hit.tokens = tokens;
  hit.unreferenced = 0;
  for (std::size_t g = 0; g < hits_.size(); ++g) {
    hits_[g].resize(std::min<std::size_t>(hits_[g].size(), tokens / layout_.groups[g].block_size));
    unreferenced_[g] = static_cast<std::uint64_t>(std::ranges::count_if(
        hits_[g], [this](SlotId block) { return block != kNoSlot && pool_.references(block) == 0; }));
    hit.unreferenced += unreferenced_[g];
  }
}

std::uint64_t BlockGroups::load_cost(const KvRequest& request, std::uint32_t total, std::uint32_t slots, bool whole) {
  const Record& r = record(request);
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.state()) {
      const std::vector<SlotId>& hits = hits_[g];
      if (!hits.empty() && hits.back() != kNoSlot && pool_.is_fresh(hits.back())) return kImpossible;
      const std::size_t states = ceil_div(slots, group.block_size);
      const bool point = whole && checkpoint(request, r.groups[g], group, total, slots);
      blocks += std::min<std::size_t>(states - std::min(states, hits.size()), point ? 2 : 1) + unreferenced_[g];
      continue;
    }
    std::size_t want = group.kind == GroupKind::Circular ? 1 : ceil_div(slots, group.block_size);
    if (whole && layout_.caps[g]) want = std::min<std::size_t>(want, *layout_.caps[g]);
    const std::size_t gone = group.skipped(total) / group.block_size;
    blocks += want - std::min(want, std::max(gone, hits_[g].size()));
    for (std::size_t i = gone; i < hits_[g].size(); ++i) {
      blocks += hits_[g][i] != kNoSlot && pool_.references(hits_[g][i]) == 0;
    }
  }
  return blocks;
}

void BlockGroups::place_load(KvRequest& request, std::uint32_t total) {
  Record& r = record(request);
  for (GroupTable& table : r.groups) table.checkpoint.reset();  // of an admission that failed
  adopt(r, total, false);
  grow_all(request, r, total);
  r.computed = r.computed_before = r.computed_earlier = total;
  r.last_tokens = 0;
  r.last_schedule = 0;
  remember_keyed(r);
}

std::uint32_t BlockGroups::processed(const KvRequest& request, std::uint32_t computed, std::uint64_t last,
                                     std::uint64_t processed) const {
  if (last <= processed || request.slot >= records_.size()) return computed;
  const Record& r = records_[request.slot];
  return last - 1 <= processed ? r.computed_before : r.computed_earlier;
}

bool BlockGroups::fits_behind(const KvRequest& request, std::uint32_t tokens, std::uint64_t spare,
                              bool reserves_whole) {
  if (reserves_whole && lacks_whole(request) + spare > pool_.num_free()) return false;
  Record& r = record(request);
  slide(request, r, r.computed);
  return need_all(request, r.computed, tokens, false, false) + spare <= pool_.num_free();
}

std::uint64_t BlockGroups::lacks_whole(const KvRequest& request) {
  const Record& r = record(request);
  const std::uint32_t start = r.last_schedule == schedule_ ? r.computed_before : r.computed;  // before this schedule
  return need_all(request, start, std::min(request.known, config_.max_model_len), false, true);
}

// Copies stay ordered: they only read and write blocks that are referenced until the schedule ends.
void BlockGroups::withdraw(KvRequest& request, bool keep_matchable) {
  if (!keep_matchable) forget_states(request);
  GroupedBackend::withdraw(request, keep_matchable);
}

}  // namespace understudy
