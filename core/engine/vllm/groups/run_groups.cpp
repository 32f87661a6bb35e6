#include "engine/vllm/groups/run_groups.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "base/spares.hpp"
#include "engine/announcer.hpp"
#include "engine/vllm/groups/group_hit.hpp"
#include "tiers/group_block.hpp"

namespace understudy {

// States, hits that end inside a block, and blocks that transfers reach are kept one by one.
bool RunGroups::serves(const VllmConfig& config) {
  const GroupLayout layout = layout_of(config);
  return !config.offload && !config.transfer && std::ranges::all_of(layout.groups, [&](const KvGroup& group) {
    const bool whole = group.kind == GroupKind::Full || group.kind == GroupKind::Mla || group.slides();
    return whole && group.cacheable() && group.block_size == layout.hash_block;
  });
}

RunGroups::RunGroups(const VllmConfig& config)
    : GroupedBackend(config),
      records_((config.events || config.check) && config.enable_prefix_caching),
      hashes_(records_ || !config.private_names || Announcer::wanted(config)),
      pool_(config.num_gpu_blocks, false, static_cast<std::uint32_t>(layout_.groups.size())),
      cover_(pool_, layout_.groups.size()),
      hits_(layout_.groups.size()) {
  if (records_) pool_.set_listener(this);
}

void RunGroups::need_names(KvRequest& request, std::uint32_t tokens) {
  const std::size_t blocks = tokens / block();
  if (records_ && request.blocks.size() < blocks) request.spec.identities->extend(request.blocks, blocks);
  if (request.names.size() >= blocks) return;
  if (request.names.capacity() == 0) request.names = Spares<BlockName>::take();
  request.spec.identities->extend_names(request.names, blocks, hashes_);
}

// ── Find ──

void RunGroups::begin_find(const KvRequest& request, std::uint32_t limit) {
  found_ = 0;
  for (auto& hits : hits_) hits.clear();
  cover_.look_up(std::span<const BlockName>(request.names).first(limit / block()));
}

std::uint32_t RunGroups::find_in(PrefixCover& cover, const Kind& kind, std::uint32_t limit) const {
  const KvGroup& group = layout_.groups[kind.front()];
  const std::uint32_t most = limit / block();
  return block() * (group.slides() ? cover.last_window(kind, most, group.window_blocks()) : cover.prefix(kind, most));
}

void RunGroups::end_find(std::uint32_t tokens) {
  found_ = tokens / block();
  if (found_ == 0) return;
  for (std::size_t g = 0; g < hits_.size(); ++g) {
    cover_.clip(g, skipped(g, found_), found_, hits_[g]);
    for (const BlockPool::Piece& piece : hits_[g]) {
      if (piece.run->references == 0) unreferenced_[g] += piece.blocks;
    }
  }
}

std::uint64_t RunGroups::evictions_until_lost() const {
  return found_ == 0 ? kImpossible : evictions() + pool_.cached_before(hits_);
}

// ── Tables ──

void RunGroups::adopt(Record& r, std::uint32_t total, bool) {
  if (total == 0) return;
  r.keyed = total;
  r.next_key = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    GroupTable& table = r.groups[g];
    UNDERSTUDY_ASSERT(table.size() == 0, "a request is admitted without blocks");
    const std::uint64_t free = pool_.num_free();
    table.runs.skipped = skipped(g, found_);
    pool_.touch(table.runs, hits_[g]);
    held_blocks_.add(g, free - pool_.num_free());
    table.keyed = static_cast<std::uint32_t>(table.size());
    UNDERSTUDY_ASSERT(table.keyed == found_, "places the hit of the last lookup");
  }
}

KvBackend::Room RunGroups::reserve(const KvRequest&, const Record& r, std::uint32_t slots, std::int64_t) {
  reserved_.clear();
  handed_out_ = 0;
  if (slots <= r.room) return Room::Taken;
  const std::size_t want = ceil_div(slots, block());
  std::size_t count = 0;
  for (const GroupTable& table : r.groups) count += want - std::min(want, table.size());
  pool_.get_new_blocks(count, reserved_);
  return Room::Taken;
}

void RunGroups::grow_table(const KvRequest&, GroupTable& table, std::size_t g, std::uint32_t slots) {
  const std::size_t want = ceil_div(slots, block());
  if (want <= table.size()) return;
  const auto fresh = std::span<const SlotId>(reserved_).subspan(handed_out_, want - table.size());
  handed_out_ += fresh.size();
  held_blocks_.add(g, fresh.size());
  table.runs.loose.insert(table.runs.loose.end(), fresh.begin(), fresh.end());
}

void RunGroups::leave(const KvRequest&, GroupTable& table, std::size_t g, std::size_t end) {
  if (end <= table.runs.skipped) return;
  const std::uint64_t free = pool_.num_free();
  pool_.skip(table.runs, static_cast<std::uint32_t>(end) - table.runs.skipped);
  held_blocks_.remove(g, pool_.num_free() - free);
}

void RunGroups::release_blocks(GroupTable& table, std::size_t g) {
  const std::uint64_t free = pool_.num_free();
  pool_.free_blocks(table.runs);
  held_blocks_.remove(g, pool_.num_free() - free);
}

void RunGroups::release_table(KvTable table) { pool_.free_blocks(table.runs); }

void RunGroups::forget_cached() {
  const std::uint64_t before = pool_.counts().evictions;
  pool_.hand_out_cached();
  forgotten_ += pool_.counts().evictions - before;
}

// ── Keys ──

void RunGroups::key_group(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) {
  const KvGroup& group = layout_.groups[g];
  GroupTable& table = r.groups[g];
  const std::uint32_t full = tokens / block();
  if (full <= table.keyed) return;
  GroupEvent event;
  for (Range kept = next_kept(request, r, group, table.keyed, full); kept.first < full;
       kept = next_kept(request, r, group, kept.last, full)) {
    const std::uint32_t first = std::max(kept.first, table.runs.skipped);
    if (first >= kept.last) continue;
    pool_.cache_blocks(table.runs, std::span<const BlockName>(request.names).first(kept.last), first,
                       static_cast<std::uint8_t>(g));
    for (std::uint32_t i = first; records_ && i < kept.last; ++i) {
      event.hashes.push_back(request.names[i]);
      event.ends.push_back((i + 1) * block());
    }
  }
  if (records_) end_event(request, table, g, full, std::move(event), events_);
  table.keyed = full;
}

void RunGroups::drop_new_keys(GroupTable& table) {
  const std::uint32_t kept = std::max(table.keyed_before, table.runs.skipped);
  pool_.withdraw(table.runs, kept - table.runs.skipped);
  table.keyed = std::max(table.keyed_before, table.runs.end_of_runs());
}

void RunGroups::removed(SlotId, BlockName name, std::uint8_t group, bool) {
  // Keys that are dropped one after another are one event per group.
  if (events_.empty() || events_.back().stored || events_.back().group != group) events_.emplace_back().group = group;
  events_.back().hashes.push_back(name);
}

// ── Watch ──

PoolMetrics RunGroups::metrics() const {
  const PoolCounts& counts = pool_.counts();
  PoolMetrics m;
  m.total_blocks = pool_.num_blocks();
  m.reset_blocks = counts.free;
  m.inactive_blocks = counts.cached;
  m.active_blocks = counts.active + counts.loose;
  m.evictions = evictions();
  m.registrations = counts.registrations;
  return m;
}

std::vector<std::uint64_t> RunGroups::contents() const {
  std::vector<std::uint64_t> out;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    for (const BlockName name : pool_.contents(static_cast<std::uint8_t>(g))) {
      out.push_back(group_key(name, static_cast<std::uint8_t>(g)));
    }
  }
  return out;
}

std::uint32_t RunGroups::cached(std::span<const BlockIdentity> blocks) const {
  if (!config_.enable_prefix_caching) return 0;
  std::vector<BlockName> names;
  for (const BlockIdentity& block : blocks) names.push_back(block.sequence_hash());
  PrefixCover cover(pool_, layout_.groups.size());
  cover.look_up(names);
  const auto find = [&](const Kind& kind, std::uint32_t limit) { return find_in(cover, kind, limit); };
  return longest_hit(layout_, static_cast<std::uint32_t>(blocks.size()) * block(), find).tokens;
}

std::span<const SlotId> RunGroups::entries(const GroupTable& table, std::vector<SlotId>& room) const {
  room.assign(table.runs.skipped, kNoSlot);
  table.runs.append_ids(room);
  return room;
}

void RunGroups::check_pool(std::uint64_t references) const {
  pool_.check();
  const std::uint64_t counted = pool_.counts().references + pool_.counts().loose;
  if (counted == references) return;
  throw Error(ErrorKind::InvariantViolated, "requests hold ", references, " blocks, the pool counts ", counted);
}

}  // namespace understudy
