#include "engine/vllm/groups/group_tiers.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <unordered_set>

#include "engine/vllm/groups/block_groups.hpp"
#include "engine/vllm/groups/group_hit.hpp"

namespace understudy {

std::uint32_t GroupTiers::find(std::span<const BlockIdentity> units, std::uint32_t known, std::uint32_t limit,
                               Tier lowest) const {
  const auto is_present = [&](const Kind& kind, std::uint32_t end) { return present(units, kind, end, lowest); };
  const auto full_run = [&](const Kind& kind) {
    const std::uint32_t block = layout_.groups[kind.front()].block_size;
    std::uint32_t length = known / block * block;
    while (length + block <= limit && is_present(kind, length + block)) length += block;
    return length;
  };
  return GroupHit(layout_, is_present, full_run).find(limit);
}

bool GroupTiers::on_device(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t end) const {
  const std::uint64_t content = units[end / layout_.hash_block - 1].sequence_hash();
  return std::ranges::all_of(
      kind, [&](std::size_t g) { return pool_.find(GroupKey{content, static_cast<std::uint8_t>(g)}) != kNoSlot; });
}

bool GroupTiers::present(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t end, Tier lowest) const {
  const BlockIdentity& unit = units[end / layout_.hash_block - 1];
  return std::ranges::all_of(kind, [&](std::size_t g) {
    return pool_.find(GroupKey{unit.sequence_hash(), static_cast<std::uint8_t>(g)}) != kNoSlot ||
           tiers_.has_below(identity(unit, g), lowest);
  });
}

// A state has the key of the hit. Full attention may have that of a longer prefix in the same block.
std::uint32_t GroupTiers::last_end(std::span<const BlockIdentity> units, const Kind& kind, std::uint32_t tokens,
                                   std::uint32_t limit, Tier lowest) const {
  const KvGroup& group = layout_.groups[kind.front()];
  if (!group.full()) return tokens;
  const std::uint32_t unit = layout_.hash_block;
  const std::uint32_t highest = std::min(limit, ceil_div(tokens, group.block_size) * group.block_size) / unit * unit;
  for (std::uint32_t end = highest; end >= tokens; end -= unit) {
    if (on_device(units, kind, end)) return end;
  }
  for (std::uint32_t end = highest; end > tokens; end -= unit) {
    if (present(units, kind, end, lowest)) return end;
  }
  return tokens;
}

GroupTiers::Needed GroupTiers::needed(std::span<const BlockIdentity> units, std::uint32_t tokens, std::uint32_t limit,
                                      Tier lowest) const {
  std::vector<std::tuple<std::uint32_t, std::size_t>> ends;  // end, group
  for (const Kind& kind : layout_.kinds) {
    const KvGroup& group = layout_.groups[kind.front()];
    const std::uint32_t first = group.skipped(tokens) / group.block_size;
    const std::uint32_t whole = tokens / group.block_size;
    const std::uint32_t tail =
        tokens % group.block_size == 0 ? 0 : last_end(units, kind, tokens, limit, lowest);  // 0: no part of a block
    for (const std::size_t g : kind) {
      for (std::uint32_t i = first; i < whole; ++i) ends.emplace_back((i + 1) * group.block_size, g);
      if (tail > 0) ends.emplace_back(tail, g);
    }
  }
  std::ranges::sort(ends);
  Needed out;
  for (const auto& [end, g] : ends) {
    const std::uint32_t block = layout_.groups[g].block_size;
    out.blocks.push_back(identity(units[end / layout_.hash_block - 1], g));
    out.covers.push_back({(end - 1) / block * block / layout_.hash_block, std::min(end, tokens) / layout_.hash_block});
  }
  return out;
}

// ── The device ──

SlotId GroupTiers::find(const BlockIdentity& block) const {
  return pool_.find(GroupKey{content_of(block), group_of(block)});
}

std::optional<BlockIdentity> GroupTiers::name_of(SlotId slot) const {
  std::uint32_t longest = 0;
  std::optional<BlockIdentity> name;
  pool_.each_key(slot, [&](std::uint64_t content, std::uint8_t group, std::uint32_t end) {
    if (end <= longest || !is_found_by(group, end)) return;
    longest = end;
    name = identity({LineageHash::make(content, false, 0, end / layout_.hash_block - 1), 0, 0}, group);
  });
  return name;
}

std::vector<BlockIdentity> GroupTiers::next_evicted(std::size_t count) const {
  std::vector<BlockIdentity> out;
  for (const SlotId slot : pool_.free_head(count)) {
    if (const std::optional<BlockIdentity> name = name_of(slot)) out.push_back(*name);
  }
  return out;
}

std::size_t GroupTiers::allocate(std::span<SlotId> out, std::span<BlockIdentity> blocks, std::span<SlotId> slots) {
  std::size_t evicted = 0;
  for (const SlotId slot : pool_.free_head(out.size())) {
    const std::optional<BlockIdentity> name = name_of(slot);
    if (!name) continue;
    ++evicted;
    blocks[blocks.size() - evicted] = *name;
    slots[slots.size() - evicted] = slot;
  }
  pool_.take(out);
  std::unordered_set<std::uint64_t> later;  // evicted behind it
  for (std::size_t i = blocks.size() - evicted; i < blocks.size(); ++i) {
    const bool last = later.insert(blocks[i].sequence_hash()).second && find(blocks[i]) == kNoSlot;
    if (!last) slots[i] = kNoSlot;
  }
  return evicted;
}

// Publishes an event per group; blocks of several units of hashing are published by the last one.
void GroupTiers::commit(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) {
  const std::uint32_t unit = layout_.hash_block;
  std::vector<GroupEvent> events(pool_.records_events() ? layout_.groups.size() : 0);
  const auto publish = [&](GroupEvent& event) {
    if (event.stored) pool_.events().push_back(std::move(event));
    event = {};
  };
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint8_t g = group_of(blocks[i]);
    const BlockIdentity last = unit_of_block(blocks[i], layout_.groups.size());
    const std::uint32_t end = (last.position() + 1) * unit;
    pool_.add_key(slots[i], GroupKey{last.sequence_hash(), g}, end, false);
    if (events.empty()) continue;
    GroupEvent& event = events[g];
    if (!event.stored || event.position + event.length + unit != end) {
      publish(event);
      event.stored = true;
      event.group = g;
      event.block_size = unit;
      event.position = end - unit;
      event.has_parent = end > unit;
      event.parent = last.parent_hash;
    }
    event.length += unit;
    event.hashes.push_back(last.sequence_hash());
    event.ends.push_back(end);
    event.units.push_back(last);
  }
  for (GroupEvent& event : events) publish(event);
}

void GroupTiers::reference(std::span<const SlotId> slots) {
  for (const SlotId slot : slots) pool_.reference(slot);
}

void GroupTiers::release(std::span<const SlotId> slots) {
  reversed_.assign(slots.rbegin(), slots.rend());
  pool_.release(reversed_);
}

// ── In the backend ──

void BlockGroups::use_tiers(WorkerTiers& tiers) {
  tiers_ = &tiers;
  held_blocks_.count_tables(pool_.num_blocks());
  below_ = std::make_unique<GroupTiers>(layout_, pool_, tiers);
  tiers.use_device(*below_, layout_.groups.size());
}

std::span<const SlotId> BlockGroups::found(const KvHit&) const {
  found_.clear();
  for (const auto& hits : hits_) {
    std::ranges::copy_if(hits, std::back_inserter(found_), [](SlotId block) { return block != kNoSlot; });
  }
  return found_;
}

const BlockGroups::Offered& BlockGroups::offered(const KvRequest& request, std::uint32_t first, std::uint32_t end) {
  offered_.slots.clear();
  offered_.blocks.clear();
  for (std::uint32_t unit = first + 1; unit <= end; ++unit) {
    const std::uint32_t tokens = unit * layout_.hash_block;
    for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
      const SlotId slot = keyed_block(request, g, tokens);
      if (slot == kNoSlot) continue;
      offered_.slots.push_back(slot);
      offered_.blocks.push_back(below_->identity(request.blocks[unit - 1], g));
    }
  }
  return offered_;
}

// The request's block of group `g` that lookups find by the key of `end`; kNoSlot: none.
SlotId BlockGroups::keyed_block(const KvRequest& request, std::size_t g, std::uint32_t end) const {
  const KvGroup& group = layout_.groups[g];
  const Record& r = records_[request.slot];
  const GroupTable& table = r.groups[g];
  if (!group.cacheable() || (end % group.block_size != 0 && !layout_.partial_hits)) return kNoSlot;
  const std::uint32_t index = (end - 1) / group.block_size;
  const SlotId slot = index < table.blocks.size() ? table.blocks[index] : kNoSlot;
  if (slot != kNoSlot && pool_.has_key(slot, end)) return slot;
  // A state's key may have moved to a copy, or belong to a checkpoint, whose block has another index.
  const bool kept = end == (request.spec.prompt_tokens - 1) / layout_.hit_unit * layout_.hit_unit || end == r.junction;
  return group.state() && kept ? pool_.find(key_of(request.blocks, g, end)) : kNoSlot;
}

// Blocks that grow_all takes.
std::size_t BlockGroups::growth(const GroupTable& table, const KvGroup& group, std::uint32_t slots) {
  if (group.kind == GroupKind::Circular) return table.blocks.empty() ? 1 : 0;
  const std::size_t want = ceil_div(slots, group.block_size);
  std::size_t blocks = want - std::min(want, table.blocks.size());
  if (group.state()) blocks = std::min<std::size_t>(blocks, table.checkpoint ? 2 : 1);
  return blocks + (table.tail == Tail::None ? 0 : 1);
}

KvBackend::Room BlockGroups::reserve(const KvRequest& request, const Record& r, std::uint32_t slots,
                                     std::int64_t now_ns) {
  if (tiers_ == nullptr) return Room::Taken;
  std::size_t count = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) count += growth(r.groups[g], layout_.groups[g], slots);
  reserved_.clear();
  if (count == 0) return Room::Taken;
  std::vector<SlotId> out(count);
  const Room room = tiers_->take(request.slot, now_ns, out);
  if (room == Room::Taken) reserved_ = std::move(out);
  return room;
}

}  // namespace understudy
