// Keys of single blocks: lookups, and what other requests can find.
#include <algorithm>
#include <utility>

#include "engine/vllm/groups/block_groups.hpp"

namespace understudy {

void BlockGroups::need_names(KvRequest& request, std::uint32_t tokens) {
  const std::size_t blocks = tokens / layout_.hash_block;
  if (request.blocks.size() < blocks) request.spec.identities->extend(request.blocks, blocks);
}

void BlockGroups::key_group(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) {
  const KvGroup& group = layout_.groups[g];
  const std::uint32_t before = r.groups[g].keyed;
  key_range(request, r, g, tokens);
  if (group.state()) {
    const std::uint32_t after = r.groups[g].keyed;
    key_state(request, r, g, tokens);
    if (lists_states_ != KeptStates::None) keep_states(request, g, before, after);
  } else if (group.kind == GroupKind::Full || group.kind == GroupKind::Mla) {
    key_tail(request, r.groups[g], g, tokens);
  }
}

void BlockGroups::key_range(KvRequest& request, Record& r, std::size_t g, std::uint32_t tokens) {
  const KvGroup& group = layout_.groups[g];
  GroupTable& table = r.groups[g];
  const std::uint32_t full = tokens / group.block_size;
  if (full <= table.keyed) return;
  GroupEvent event;
  for (Range kept = next_kept(request, r, group, table.keyed, full); kept.first < full;
       kept = next_kept(request, r, group, kept.last, full)) {
    key_blocks(request, table, g, kept, pool_.records_events() ? &event : nullptr);
  }
  if (pool_.records_events()) end_event(request, table, g, full, std::move(event), pool_.events());
  table.keyed = full;
}

// Give the blocks of a range their keys; null entries are left out.
void BlockGroups::key_blocks(const KvRequest& request, GroupTable& table, std::size_t g, Range range,
                             GroupEvent* event) {
  const KvGroup& group = layout_.groups[g];
  for (std::uint32_t i = range.first; i < range.last; ++i) {
    if (table.blocks[i] == kNoSlot) continue;
    const std::uint32_t end = (i + 1) * group.block_size;
    const GroupKey key = key_of(request.blocks, g, end);
    pool_.add_key(table.blocks[i], key, end, group.state());
    if (event == nullptr) continue;
    event->hashes.push_back(key.content);
    event->ends.push_back(end);
  }
}

// The last block of a prompt also has the key of the prompt's last unit of hashing.
void BlockGroups::key_tail(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t tokens) {
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

void BlockGroups::store_unit(const KvRequest& request, SlotId block, std::size_t g, std::uint32_t end) {
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

void BlockGroups::drop_new_keys(GroupTable& table) {
  for (std::size_t i = table.keyed_before; i < table.blocks.size(); ++i) {
    if (table.blocks[i] != kNoSlot) pool_.drop_new(table.blocks[i]);
  }
  table.keyed = table.keyed_before;
}

// ── Lookups ──

void BlockGroups::begin_find(const KvRequest&, std::uint32_t) {
  for (auto& hits : hits_) hits.clear();
}

void BlockGroups::end_find(std::uint32_t tokens) {
  for (std::size_t g = 0; g < hits_.size(); ++g) {
    if (tokens == 0) hits_[g].clear();
    const std::size_t most = ceil_div(tokens, layout_.groups[g].block_size);
    if (layout_.groups[g].full() && hits_[g].size() > most) hits_[g].resize(most);
    for (const SlotId block : hits_[g]) unreferenced_[g] += block != kNoSlot && pool_.references(block) == 0;
  }
}

std::uint64_t BlockGroups::evictions_until_lost() const {
  const bool none = std::ranges::all_of(hits_, [](const auto& hits) { return hits.empty(); });
  return none ? kImpossible : pool_.evictions() + pool_.cached_before(hits_);
}

// Groups of a kind differ in the number of the group alone.
bool BlockGroups::look_up(const KvRequest& request, const Kind& kind, std::uint32_t end) {
  row_.clear();
  for (const std::size_t g : kind) {
    const SlotId block = pool_.find(key_of(request.blocks, g, end));
    if (block == kNoSlot) return false;
    row_.push_back(block);
  }
  return true;
}

std::uint32_t BlockGroups::find_kind(const KvRequest& request, const Kind& kind, std::uint32_t limit) {
  for (const std::size_t g : kind) hits_[g].clear();
  const KvGroup& group = layout_.groups[kind.front()];
  if (group.slides()) return find_window(request, kind, limit);
  if (group.kind == GroupKind::ChunkedLocal) return find_local(request, kind, limit);
  if (group.kind == GroupKind::State) return find_state(request, kind, limit);
  return find_full(request, kind, limit);
}

std::uint32_t BlockGroups::find_full(const KvRequest& request, const Kind& kind, std::uint32_t limit) {
  const std::uint32_t block = layout_.groups[kind.front()].block_size;
  const std::uint32_t unit = layout_.hit_unit;
  const auto push = [&] {
    for (std::size_t i = 0; i < kind.size(); ++i) hits_[kind[i]].push_back(row_[i]);
  };
  std::uint32_t length = 0;
  for (; length + block <= limit && look_up(request, kind, length + block); length += block) push();
  if (unit < block) {  // a hit may end inside the next block
    for (std::uint32_t end = std::min(limit, length + block - 1) / unit * unit; end > length; end -= unit) {
      if (!look_up(request, kind, end)) continue;
      push();
      length = end;
      break;
    }
  }
  return length / unit * unit;
}

// The last run of blocks that covers a window, or else the run from the first block on.
std::uint32_t BlockGroups::find_window(const KvRequest& request, const Kind& kind, std::uint32_t limit) {
  const KvGroup& group = layout_.groups[kind.front()];
  const std::uint32_t block = group.block_size;
  const std::uint32_t need = group.window_blocks();
  for (const std::size_t g : kind) hits_[g].assign(limit / block, kNoSlot);
  const auto end_at = [&](std::uint32_t blocks) {
    for (const std::size_t g : kind) hits_[g].resize(blocks);
    return blocks * block;
  };
  std::uint32_t run = 0;
  for (std::uint32_t i = limit / block; i-- > 0;) {
    if (!look_up(request, kind, (i + 1) * block)) {
      for (const std::size_t g : kind) std::fill_n(hits_[g].begin() + i + 1, run, kNoSlot);
      run = 0;
      continue;
    }
    if (run == 0 && (i + 1) * block % layout_.hit_unit != 0) continue;
    ++run;
    for (std::size_t m = 0; m < kind.size(); ++m) hits_[kind[m]][i] = row_[m];
    if (run == need) return end_at(i + run);
  }
  return end_at(run);
}

std::uint32_t BlockGroups::find_local(const KvRequest& request, const Kind& kind, std::uint32_t limit) {
  const KvGroup& group = layout_.groups[kind.front()];
  std::uint32_t length = limit / group.chunk * group.chunk;  // before it nothing is read
  for (const std::size_t g : kind) hits_[g].assign(length / group.block_size, kNoSlot);
  while (length + group.block_size <= limit && look_up(request, kind, length + group.block_size)) {
    for (std::size_t i = 0; i < kind.size(); ++i) hits_[kind[i]].push_back(row_[i]);
    length += group.block_size;
  }
  return length;
}

std::uint32_t BlockGroups::find_state(const KvRequest& request, const Kind& kind, std::uint32_t limit) {
  const std::uint32_t block = layout_.groups[kind.front()].block_size;
  for (std::uint32_t end = limit / layout_.hit_unit * layout_.hit_unit; end > 0; end -= layout_.hit_unit) {
    if (!look_up(request, kind, end)) continue;
    for (std::size_t i = 0; i < kind.size(); ++i) {
      hits_[kind[i]].assign((end + block - 1) / block, kNoSlot);
      hits_[kind[i]].back() = row_[i];
    }
    return end;
  }
  return 0;
}

}  // namespace understudy
