#include "engine/vllm/groups/group_tiers.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <unordered_set>

#include "engine/vllm/groups/group_hit.hpp"
#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

BlockIdentity GroupTiers::identity(std::uint64_t content, std::size_t group, std::uint32_t end) const {
  const std::size_t position = (end / layout_.hash_block - 1) * layout_.groups.size() + group;
  const std::uint64_t hash = group_key(content, static_cast<std::uint8_t>(group));
  return {LineageHash::make(hash, false, 0, static_cast<std::uint32_t>(position)), 0, 0};
}

std::uint32_t GroupTiers::find(std::span<const BlockIdentity> units, std::uint32_t known, std::uint32_t limit,
                               Tier lowest) const {
  const auto present = [&](const std::vector<std::size_t>& kind, std::uint32_t end) {
    const std::uint64_t content = units[end / layout_.hash_block - 1].sequence_hash();
    return std::ranges::all_of(kind, [&](std::size_t g) {
      return pool_.find(content, static_cast<std::uint8_t>(g)) != kNoSlot ||
             tiers_.has_below(identity(content, g, end), lowest);
    });
  };
  const auto full_run = [&](const std::vector<std::size_t>& kind) {
    const std::uint32_t block = layout_.groups[kind.front()].block_size;
    std::uint32_t length = known / block * block;
    while (length + block <= limit && present(kind, length + block)) length += block;
    return length;
  };
  return GroupHit(layout_, present, full_run).find(limit);
}

GroupTiers::Needed GroupTiers::needed(std::span<const BlockIdentity> units, std::uint32_t tokens) const {
  std::vector<std::tuple<std::uint32_t, std::size_t>> ends;  // end, group
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    for (std::uint32_t i = group.skipped(tokens) / group.block_size; i < tokens / group.block_size; ++i) {
      ends.emplace_back((i + 1) * group.block_size, g);
    }
  }
  std::ranges::sort(ends);
  Needed out;
  for (const auto& [end, g] : ends) {
    const std::size_t last = end / layout_.hash_block;
    out.blocks.push_back(identity(units[last - 1].sequence_hash(), g, end));
    out.covers.push_back({last - layout_.groups[g].block_size / layout_.hash_block, last});
  }
  return out;
}

// ── The device ──

SlotId GroupTiers::find(const BlockIdentity& block) const { return pool_.find(content_of(block), group_of(block)); }

std::size_t GroupTiers::allocate(std::span<SlotId> out, std::span<BlockIdentity> blocks, std::span<SlotId> slots) {
  std::size_t evicted = 0;
  for (const SlotId slot : pool_.free_head(out.size())) {
    pool_.each_key(slot, [&](std::uint64_t content, std::uint8_t group, std::uint32_t end) {
      if (end % layout_.groups[group].block_size != 0) return;  // a part of a block
      ++evicted;
      blocks[blocks.size() - evicted] = identity(content, group, end);
      slots[slots.size() - evicted] = slot;
    });
  }
  pool_.take(out);
  std::unordered_set<std::uint64_t> later;  // evicted behind it
  for (std::size_t i = blocks.size() - evicted; i < blocks.size(); ++i) {
    const bool last = later.insert(blocks[i].sequence_hash()).second && find(blocks[i]) == kNoSlot;
    if (!last) slots[i] = kNoSlot;
  }
  return evicted;
}

void GroupTiers::commit(std::span<const SlotId> slots, std::span<const BlockIdentity> blocks) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint8_t g = group_of(blocks[i]);
    const std::uint64_t content = content_of(blocks[i]);
    const std::uint32_t end = end_of(blocks[i]);
    pool_.add_key(slots[i], content, g, end, false);
    if (!pool_.records_events()) continue;
    // Only for checks: engines with tiers and groups publish no events.
    const std::uint32_t unit = layout_.hash_block;
    GroupEvent event;
    event.stored = true;
    event.group = g;
    event.block_size = event.length = unit;
    event.position = end - unit;
    event.hashes = {content};
    event.ends = {end};
    event.units = {{LineageHash::make(content, false, 0, end / unit - 1), 0, 0}};
    pool_.events().push_back(std::move(event));
  }
}

void GroupTiers::reference(std::span<const SlotId> slots) {
  for (const SlotId slot : slots) pool_.reference(slot);
}

void GroupTiers::release(std::span<const SlotId> slots) {
  reversed_.assign(slots.rbegin(), slots.rend());
  pool_.release(reversed_);
}

// ── In the backend ──

void GroupedBackend::use_tiers(WorkerTiers& tiers) {
  tiers_ = &tiers;
  below_ = std::make_unique<GroupTiers>(layout_, pool_, tiers);
  tiers.use_device(*below_);
}

std::span<const SlotId> GroupedBackend::found(const KvHit&) const {
  found_.clear();
  for (const auto& hits : hits_) {
    std::ranges::copy_if(hits, std::back_inserter(found_), [](SlotId block) { return block != kNoSlot; });
  }
  return found_;
}

std::uint32_t GroupedBackend::keyed_units(const KvRequest& request) const {
  std::uint32_t units = ~std::uint32_t{0};
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const std::uint32_t per_block = layout_.groups[g].block_size / layout_.hash_block;
    units = std::min(units, records_[request.slot].groups[g].keyed * per_block);
  }
  return units;
}

const GroupedBackend::Offered& GroupedBackend::offered(const KvRequest& request, std::uint32_t first,
                                                       std::uint32_t end) {
  const Record& r = records_[request.slot];
  offered_.slots.clear();
  offered_.blocks.clear();
  for (std::uint32_t unit = first + 1; unit <= end; ++unit) {
    const std::uint32_t tokens = unit * layout_.hash_block;
    for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
      const std::uint32_t block = layout_.groups[g].block_size;
      if (tokens % block != 0) continue;
      const SlotId slot = r.groups[g].blocks[tokens / block - 1];
      if (slot == kNoSlot || !pool_.has_key(slot, tokens)) continue;
      offered_.slots.push_back(slot);
      offered_.blocks.push_back(below_->identity(content(request, tokens), g, tokens));
    }
  }
  return offered_;
}

KvBackend::Room GroupedBackend::reserve(const KvRequest& request, const Record& r, std::uint32_t slots,
                                        std::int64_t now_ns) {
  std::size_t count = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const std::size_t want = ceil_div(slots, layout_.groups[g].block_size);
    count += want - std::min(want, r.groups[g].blocks.size());
  }
  reserved_.clear();
  if (count == 0) return Room::Taken;
  std::vector<SlotId> out(count);
  const Room room = tiers_->take(request.slot, now_ns, out);
  if (room == Room::Taken) reserved_ = std::move(out);
  return room;
}

}  // namespace understudy
