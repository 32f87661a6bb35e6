#include "engine/vllm/groups/grouped_backend.hpp"

#include <algorithm>
#include <unordered_set>

#include "base/errors.hpp"
#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

GroupLayout layout_of(const VllmConfig& c) {
  return GroupLayout({c.groups, c.enable_prefix_caching, c.async_scheduling, c.max_model_len, c.max_num_batched_tokens,
                      c.prefix_match_unit, c.prefix_cache_retention_interval});
}

namespace {

// Whether a hit may end inside a block of some group, which is then copied.
bool may_copy(const GroupLayout& layout) {
  return layout.has_states || std::ranges::any_of(layout.groups, [&](const KvGroup& group) {
           return group.kind == GroupKind::ChunkedLocal || group.block_size != layout.groups.front().block_size;
         });
}

}  // namespace

GroupedBackend::GroupedBackend(const VllmConfig& config)
    : config_(config),
      layout_(layout_of(config)),
      pool_(config.num_gpu_blocks, (config.events || config.check) && config.enable_prefix_caching),
      hits_(layout_.groups.size()),
      unreferenced_(layout_.groups.size()),
      held_blocks_(layout_.groups.size()) {
  for (const KvGroup& group : layout_.groups) {
    units_per_block_.push_back(group.block_size / layout_.hash_block);
    has_rswa_ |= group.kind == GroupKind::Rswa;
    has_tails_ |=
        (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) && group.block_size != layout_.hash_block;
  }
  if (may_copy(layout_) || config.offload || config.transfer) held_blocks_.count_tables(config.num_gpu_blocks);
}

void GroupedBackend::begin_schedule() {
  ++schedule_;
  pool_.begin_schedule();
  copies_.clear();
}

void GroupedBackend::end_schedule() {
  if (!ordered_.empty()) pool_.release(end_schedule_later());
}

std::vector<SlotId> GroupedBackend::end_schedule_later() {
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

void GroupedBackend::received(KvRequest& request, std::uint32_t computed) {
  if (computed > 0) key(request, computed);
}

void GroupedBackend::count_lookup(std::uint32_t queries, std::uint32_t hits, bool preempted) {
  if (!config_.enable_prefix_caching) return;
  GroupHitStats& stats = stats_[preempted ? 1 : 0];
  ++stats.requests;
  stats.queries += queries;
  stats.hits += hits;
}

void GroupedBackend::count_admission(const KvRequest& request, std::uint32_t hits) {
  if (!config_.enable_prefix_caching) return;
  const std::uint32_t first = record(request).junction;
  ++admitted_.admissions;
  admitted_.shortened += first > hits;
  admitted_.queries += request.known;
  admitted_.hits += hits;
  admitted_.full_hits += std::max(hits, first);
}

GroupReport GroupedBackend::report() const {
  GroupReport out = admitted_;
  out.has_full = !layout_.kinds.empty() && layout_.groups[layout_.kinds.front().front()].full();
  out.samples = held_blocks_.samples();
  out.peaks = held_blocks_.peaks();
  return out;
}

// ── Watch ──

PoolMetrics GroupedBackend::metrics() const {
  PoolMetrics m;
  m.total_blocks = pool_.num_blocks();
  m.reset_blocks = pool_.num_free() - pool_.num_cached();
  m.inactive_blocks = pool_.num_cached();
  m.active_blocks = pool_.num_blocks() - pool_.num_free();
  m.evictions = pool_.evictions();
  m.registrations = pool_.registrations();
  return m;
}

std::vector<std::uint64_t> GroupedBackend::held(std::span<const RequestSlot> requests) const {
  std::vector<std::uint64_t> counts(layout_.groups.size(), 0);
  for (const RequestSlot slot : requests) {
    for (std::size_t g = 0; g < counts.size(); ++g) {
      const GroupTable& table = records_[slot].groups[g];
      const KvGroup& group = layout_.groups[g];
      if (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) {  // no entry is null
        counts[g] += table.blocks.size();
        continue;
      }
      std::size_t first = group.full() ? 0 : table.slid;              // leading entries are null
      if (group.slides() || group.kind == GroupKind::ChunkedLocal) {  // and none behind them
        while (first < table.blocks.size() && table.blocks[first] == kNoSlot) ++first;
        counts[g] += table.blocks.size() - first;
        continue;
      }
      for (std::size_t i = first; i < table.blocks.size(); ++i) counts[g] += table.blocks[i] != kNoSlot;
    }
  }
  return counts;
}

void GroupedBackend::check(std::span<const RequestSlot> holders, std::uint64_t kept) const {
  std::uint64_t references = kept;
  for (const std::uint64_t blocks : held(holders)) references += blocks;
  pool_.check(references + 2 * ordered_.size());
  std::vector<std::unordered_set<SlotId>> distinct(layout_.groups.size());
  for (const Record& r : records_) {
    for (std::size_t g = 0; g < r.groups.size(); ++g) {
      for (const SlotId block : r.groups[g].blocks) {
        if (block != kNoSlot) distinct[g].insert(block);
      }
    }
  }
  for (std::size_t g = 0; g < distinct.size(); ++g) {
    if (held_blocks_.counts()[g] == distinct[g].size()) continue;
    throw Error(ErrorKind::InvariantViolated, "requests hold ", distinct[g].size(), " blocks of group ", g, ", ",
                held_blocks_.counts()[g], " are counted");
  }
  for (std::size_t slot = 0; slot < records_.size(); ++slot) {
    if (std::ranges::find(holders, slot) != holders.end()) continue;
    for (const GroupTable& table : records_[slot].groups) {
      if (!table.blocks.empty()) throw Error(ErrorKind::InvariantViolated, "a request that does not run holds blocks");
    }
  }
}

std::uint32_t GroupedBackend::cached(std::span<const BlockIdentity> units) const {
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

std::uint64_t GroupedBackend::digest(std::span<const RequestSlot> running) const {
  std::uint64_t hash = pool_.num_free() * 31 + pool_.num_cached();
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; };
  for (const RequestSlot slot : running) {
    for (const GroupTable& table : records_[slot].groups) {
      mix(table.blocks.size());
      mix(table.keyed);
      for (const SlotId block : table.blocks) mix(block != kNoSlot);
    }
  }
  return hash;
}

}  // namespace understudy
