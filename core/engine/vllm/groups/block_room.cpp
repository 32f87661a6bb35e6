// Single blocks that a request needs, takes and leaves behind.
#include <algorithm>
#include <iterator>

#include "base/assert.hpp"
#include "engine/vllm/groups/block_groups.hpp"

namespace understudy {

std::uint64_t BlockGroups::need(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total,
                                std::uint32_t slots, bool admission, bool whole) {
  if (layout_.groups[g].state()) return need_state(request, r, g, total, slots, admission, whole);
  return GroupedBackend::need(request, r, g, total, slots, admission, whole);
}

std::uint64_t BlockGroups::need_state(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total,
                                      std::uint32_t slots, bool admission, bool whole) {
  const KvGroup& group = layout_.groups[g];
  GroupTable& table = r.groups[g];
  const std::vector<SlotId>& hits = hits_[g];
  const std::size_t found = admission ? hits.size() : 0;
  const auto point = checkpoint(request, table, group, total, slots);
  if (!whole) table.checkpoint = point;
  if (found > 0 && hits.back() != kNoSlot && pool_.is_fresh(hits.back())) return kImpossible;
  const bool tail = (found > 0 && total % group.block_size != 0) || table.tail != Tail::None;
  std::int64_t blocks = std::int64_t{ceil_div(slots, group.block_size)} - static_cast<std::int64_t>(found) -
                        static_cast<std::int64_t>(table.blocks.size());
  if (tail) blocks = std::max<std::int64_t>(blocks, 0) + 1;
  if (blocks > 0) blocks = std::min<std::int64_t>(blocks, 1 + (tail ? 1 : 0) + (point ? 1 : 0));
  std::uint64_t answer = blocks > 0 ? static_cast<std::uint64_t>(blocks) : 0;
  return admission ? answer + unreferenced_[g] : answer;
}

// Reference the blocks of the last find, for a request that has `total` tokens then.
void BlockGroups::adopt(Record& r, std::uint32_t total, bool copies_tail) {
  if (total == 0) return;
  r.keyed = total;
  r.next_key = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    GroupTable& table = r.groups[g];
    const std::vector<SlotId>& hits = hits_[g];
    const std::ptrdiff_t gone = group.skipped(total) / group.block_size;
    UNDERSTUDY_ASSERT(table.blocks.empty(), "a request is admitted without blocks");
    table.blocks.assign(static_cast<std::size_t>(gone), kNoSlot);
    if (gone < std::ssize(hits)) table.blocks.insert(table.blocks.end(), hits.begin() + gone, hits.end());
    for (const SlotId block : table.blocks) {
      if (block != kNoSlot) held_blocks_.add_cached(g, block, pool_.reference(block));
    }
    table.keyed = static_cast<std::uint32_t>(table.blocks.size());
    if (!copies_tail || hits.empty() || total % group.block_size == 0) continue;
    table.keyed = total / group.block_size;
    table.tail = Tail::Found;
  }
}

void BlockGroups::grow_table(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) {
  const KvGroup& group = layout_.groups[g];
  if (group.kind == GroupKind::Circular) {
    take_up_to(table, g, 1);
  } else if (group.state()) {
    grow_state(request, table, g, slots);
  } else {
    copy_tail(request, table, g);
    take_up_to(table, g, ceil_div(slots, group.block_size));
  }
}

void BlockGroups::grow_state(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) {
  const std::size_t want = ceil_div(slots, layout_.groups[g].block_size);
  if (want <= table.blocks.size() && table.tail == Tail::None && !table.checkpoint) return;
  copy_tail(request, table, g);
  const std::size_t last = table.checkpoint ? 2 : 1;  // entries that get a block
  if (want > last && table.blocks.size() < want - last) table.blocks.resize(want - last, kNoSlot);
  take_up_to(table, g, want);
}

void BlockGroups::take_up_to(GroupTable& table, std::size_t g, std::size_t size) {
  const std::size_t held = table.blocks.size();
  if (size <= held) return;
  table.blocks.resize(size);
  const std::span<SlotId> fresh = std::span(table.blocks).subspan(held);
  take(fresh);
  held_blocks_.add_free(g, fresh);
}

// With tiers: of the blocks that `reserve` has allocated.
void BlockGroups::take(std::span<SlotId> out) {
  if (tiers_ == nullptr) return pool_.take(out);
  UNDERSTUDY_ASSERT(out.size() <= reserved_.size(), "more blocks are taken than were reserved");
  const auto end = reserved_.begin() + std::ssize(out);
  std::copy(reserved_.begin(), end, out.begin());
  reserved_.erase(reserved_.begin(), end);
}

// The request goes on in a copy: of a block that others may use, or (its own state) of one that stays cached.
void BlockGroups::copy_tail(const KvRequest& request, GroupTable& table, std::size_t g) {
  if (table.tail == Tail::None) return;
  const SlotId source = table.blocks.back();
  const SlotId copy = take_one();
  if (table.tail == Tail::Found) {
    table.blocks.back() = copy;
    held_blocks_.remove(g, {&source, 1}, 0);
    held_blocks_.add_free(g, {&copy, 1});
    pool_.reference(copy);
  } else {
    pool_.move_keys(source, copy);
    pool_.reference(source);
    if (lists_states_ != KeptStates::None) keep_state(request, g, copy);
  }
  table.tail = Tail::None;
  ordered_.push_back({g, source, copy});
}

void BlockGroups::leave(const KvRequest& request, GroupTable& table, std::size_t g, std::size_t end) {
  const KvGroup& group = layout_.groups[g];
  std::size_t first = 0;
  if (group.kind == GroupKind::Rswa) first = ceil_div(request.spec.prompt_tokens, group.block_size);
  if (group.state()) first = table.slid;
  freed_.clear();
  for (std::size_t i = end; i-- > first;) {
    if (table.blocks[i] == kNoSlot) {
      if (group.state()) continue;
      break;
    }
    freed_.push_back(table.blocks[i]);
    table.blocks[i] = kNoSlot;
  }
  held_blocks_.remove(g, freed_, pool_.release(freed_));
}

void BlockGroups::release(KvRequest& request) {
  forget_states(request);
  GroupedBackend::release(request);
}

void BlockGroups::release_blocks(GroupTable& table, std::size_t g) {
  freed_.clear();
  const std::size_t first = layout_.groups[g].full() ? 0 : table.slid;  // leading entries are null
  for (std::size_t i = table.blocks.size(); i-- > first;) {
    if (table.blocks[i] != kNoSlot) freed_.push_back(table.blocks[i]);
  }
  held_blocks_.remove(g, freed_, pool_.release(freed_));
  table.blocks.clear();
}

KvTable BlockGroups::detach(KvRequest& request) {
  std::vector<SlotId> blocks;
  Record& r = record(request);
  for (std::size_t g = 0; g < r.groups.size(); ++g) {
    GroupTable& table = r.groups[g];
    held_blocks_.remove(g, table.blocks, 0);
    std::ranges::copy_if(table.blocks, std::back_inserter(blocks), [](SlotId block) { return block != kNoSlot; });
    table.blocks.clear();
  }
  release(request);  // the rest of its record
  return {std::move(blocks), {}};
}

void BlockGroups::release_table(KvTable table) {
  freed_.assign(table.ids.rbegin(), table.ids.rend());
  pool_.release(freed_);
}

}  // namespace understudy
