// Keys of blocks: what other requests can find.
#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

void GroupedBackend::need_names(KvRequest& request, std::uint32_t tokens) {
  const std::size_t blocks = tokens / layout_.hash_block;
  if (request.blocks.size() < blocks) request.spec.identities->extend(request.blocks, blocks);
}

// Give the blocks of the first `tokens` tokens their keys.
void GroupedBackend::key(KvRequest& request, std::uint32_t tokens) {
  if (!config_.enable_prefix_caching) return;
  need_names(request, tokens);
  Record& r = record(request);
  if (tokens < r.next_key) return;
  const std::uint32_t n = rounds_keys() ? tokens / layout_.scheduler_block * layout_.scheduler_block : tokens;
  r.keyed = std::max(r.keyed, n);
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (!group.cacheable()) continue;
    const std::uint32_t before = r.groups[g].keyed;
    key_range(request, r, g, n);
    if (group.state()) {
      const std::uint32_t after = r.groups[g].keyed;
      key_state(request, r, g, n);
      if (lists_states_ != KeptStates::None) keep_states(request, g, before, after);
    } else if (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) {
      key_tail(request, r.groups[g], g, n);
    }
  }
  update_next_key(r);
}

void GroupedBackend::update_next_key(Record& r) const {
  if (layout_.has_states || has_tails_) return;
  std::uint64_t next = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.cacheable()) next = std::min(next, tokens_to_key(r.groups[g], group));
  }
  r.next_key = static_cast<std::uint32_t>(next);
}

bool GroupedBackend::keys_for(const KvRequest& waiting, KvRequest& request, std::uint32_t tokens) {
  if (!config_.enable_prefix_caching) return false;
  std::uint64_t first = tokens;  // tokens before the first block without a key
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    if (group.cacheable()) first = std::min(first, std::uint64_t{record(request).groups[g].keyed} * group.block_size);
  }
  // Contents that differ in one unit of hashing differ in all later ones.
  const std::size_t unit = first / layout_.hash_block;
  if (unit >= tokens / layout_.hash_block || unit >= waiting.blocks.size()) return false;
  need_names(request, tokens);
  return request.blocks[unit].sequence_hash() == waiting.blocks[unit].sequence_hash();
}

void GroupedBackend::key_range(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) {
  const KvGroup& group = layout_.groups[g];
  GroupTable& table = r.groups[g];
  const std::uint32_t block = group.block_size;
  const std::uint32_t full = tokens / block;
  if (full <= table.keyed) return;
  GroupEvent event;
  for (Range kept = next_kept(request, r, group, table.keyed, full); kept.first < full;
       kept = next_kept(request, r, group, kept.last, full)) {
    key_blocks(request, table, g, kept, pool_.records_events() ? &event : nullptr);
  }
  if (pool_.records_events()) {
    event.stored = true;
    event.group = static_cast<std::uint8_t>(g);
    event.block_size = block;
    event.position = table.keyed * block;
    event.length = (full - table.keyed) * block;
    event.has_parent = table.keyed > 0;
    if (event.has_parent) event.parent = content(request, event.position);
    event.request = request.id;
    event.units = units(request, event);
    pool_.events().push_back(std::move(event));
  }
  table.keyed = full;
}

// Give the blocks of a range their keys; null entries are left out.
void GroupedBackend::key_blocks(const KvRequest& request, GroupTable& table, std::size_t g, Range range,
                                GroupEvent* event) {
  const std::span<const BlockIdentity> units = request.blocks;
  const std::uint32_t block = layout_.groups[g].block_size;
  std::array<std::uint64_t, KeyIndex::kNeighbours> contents;
  for (std::uint32_t first = range.first, last = 0; first < range.last; first = last) {
    last = std::min(range.last, first / kBatch * kBatch + kBatch);
    for (std::uint32_t i = first; i < last; i = next_home(i)) pool_.touch_place(key_at(units, g, i));
    for (std::uint32_t i = first; i < last; ++i) {
      if (table.blocks[i] != kNoSlot) pool_.touch_block(table.blocks[i]);
    }
    for (std::uint32_t i = first; i < last;) {
      if (table.blocks[i] == kNoSlot) {
        ++i;
        continue;
      }
      const std::uint32_t begin = i;
      const std::uint32_t stop = std::min(last, next_home(i));
      for (; i < stop && table.blocks[i] != kNoSlot; ++i) {
        contents[i - begin] = units[(i + 1) * units_per_block_[g] - 1].sequence_hash();
      }
      const std::span<const std::uint64_t> named(contents.data(), i - begin);
      pool_.add_keys(std::span(table.blocks).subspan(begin, named.size()), named,
                     {near_of(units, g, begin, named.front()), static_cast<std::uint8_t>(g), layout_.groups[g].state(),
                      (begin + 1) * block, block});
      table.first_named = std::min(table.first_named, begin);
      table.end_named = std::max(table.end_named, i);
      if (event == nullptr) continue;
      for (std::uint32_t n = begin; n < i; ++n) {
        event->hashes.push_back(contents[n - begin]);
        event->ends.push_back((n + 1) * block);
      }
    }
  }
}

std::vector<BlockIdentity> GroupedBackend::units(const KvRequest& request, const GroupEvent& event) const {
  const std::uint32_t unit = layout_.hash_block;
  const auto first = request.blocks.begin() + event.position / unit;
  return {first, first + event.length / unit};
}

// The last block of a prompt also has the key of the prompt's last unit of hashing.
void GroupedBackend::key_tail(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t tokens) {
  const std::uint32_t block = layout_.groups[g].block_size;
  if (block == layout_.hash_block) return;
  const std::uint32_t end = (request.spec.prompt_tokens - 1) / layout_.hash_block * layout_.hash_block;
  if (end == 0 || end > tokens || end % block == 0 || end / block >= table.blocks.size()) return;
  const SlotId slot = table.blocks[end / block];
  if (slot == kNoSlot) return;
  pool_.drop_shorter(slot, end);
  if (pool_.has_key(slot, end)) return;
  store_unit(request, slot, g, end);
}

void GroupedBackend::store_unit(const KvRequest& request, SlotId block, std::size_t g, std::uint32_t end) {
  const std::uint32_t unit = layout_.hash_block;
  pool_.add_key(block, key_of(request.blocks, g, end), end, layout_.groups[g].state());
  if (!pool_.records_events()) return;
  GroupEvent event;
  event.stored = true;
  event.group = static_cast<std::uint8_t>(g);
  event.block_size = event.length = unit;
  event.position = end - unit;
  event.has_parent = end > unit;
  if (event.has_parent) event.parent = content(request, end - unit);
  event.request = request.id;
  event.hashes = {content(request, end)};
  event.ends = {end};
  event.units = units(request, event);
  pool_.events().push_back(std::move(event));
}

GroupedBackend::Range GroupedBackend::next_kept(const KvRequest& request, const Record& r, const KvGroup& group,
                                                std::uint32_t index, std::uint32_t end) const {
  if (!group.slides() && !group.state()) return {index, end};
  if (layout_.retention == std::uint32_t{0} && (r.junction == 0 || index > r.junction / group.block_size)) {
    // Only blocks at the end of the prompt get a key, and those at a junction, which lies before.
    const std::uint32_t last =
        (request.spec.prompt_tokens - 1) / layout_.hit_unit * layout_.hit_unit / group.block_size;
    const std::uint32_t need = group.slides() ? group.window_blocks() : 1;
    const std::uint32_t first = std::max(index, last - std::min(last, need));
    return first < std::min(last, end) ? Range{first, std::min(last, end)} : Range{end, end};
  }
  while (index < end && !keeps(request, r, group, index, true)) ++index;
  std::uint32_t last = index;
  while (last < end && keeps(request, r, group, last, true)) ++last;
  return {index, last};
}

bool GroupedBackend::keeps(const KvRequest& request, const Record& r, const KvGroup& group, std::uint32_t index,
                           bool reach) const {
  // By the retention interval, or (with `reach`) because the prompt or a junction ends there.
  const std::uint32_t block = group.block_size;
  if (!group.slides() && !group.state()) return true;
  const std::uint32_t need = group.slides() ? group.window_blocks() : 1;
  if (!layout_.retention || *layout_.retention > 0) {
    if (!layout_.retention && group.state()) return true;
    const std::uint32_t period = (layout_.retention ? *layout_.retention : layout_.hit_unit) / block;
    if (need >= period || index % period >= period - need) return true;
    if (!layout_.retention) return false;
  }
  if (!reach) return false;
  const auto covers = [&](std::uint32_t position) {
    const std::uint32_t end = position / layout_.hit_unit * layout_.hit_unit / block;  // blocks
    return index < end && index + need >= end;
  };
  return covers(request.spec.prompt_tokens - 1) || (r.junction > 0 && covers(r.junction));
}

}  // namespace understudy
