// Blocks that a request needs, takes and leaves behind, group by group.
#include <algorithm>
#include <limits>
#include <utility>

#include "engine/vllm/groups/grouped_backend.hpp"

namespace understudy {

GroupedBackend::Record& GroupedBackend::new_record(RequestSlot slot) {
  if (records_.size() <= slot) records_.resize(slot + 1);
  records_[slot].groups.resize(layout_.groups.size());
  return records_[slot];
}

// ── Need ──

std::uint64_t GroupedBackend::whole_cost(const KvRequest& request, const KvHit& hit, std::uint32_t tokens) {
  return need_all(request, hit.tokens, tokens, true, true);
}

std::uint64_t GroupedBackend::cost(KvRequest& request, const KvHit& hit, std::uint32_t tokens) {
  return need_all(request, hit.tokens, std::max(hit.tokens, tokens), true, false);
}

std::uint64_t GroupedBackend::need_all(const KvRequest& request, std::uint32_t total, std::uint32_t slots,
                                       bool admission, bool whole) {
  Record& r = record(request);
  if (!admission && slots <= r.room) return 0;
  std::uint64_t blocks = 0;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    blocks += need(request, r, g, total, slots, admission, whole);
  }
  return blocks;
}

// Blocks for `slots` tokens, of which `total` are computed or found.
std::uint64_t GroupedBackend::need(const KvRequest&, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                                   bool admission, bool whole) {
  const KvGroup& group = layout_.groups[g];
  const std::size_t held = r.groups[g].size();
  if (group.kind == GroupKind::Circular) return held == 0 ? 1 : 0;
  std::uint32_t want = ceil_div(slots, group.block_size);
  if (whole && layout_.caps[g]) want = std::min(want, *layout_.caps[g]);
  const std::uint32_t gone = group.skipped(total) / group.block_size;
  const std::size_t found = admission ? num_found(g) : 0;
  const std::size_t there = std::max<std::size_t>(gone, found + held);
  std::uint64_t blocks = want - std::min<std::size_t>(want, there);
  if (admission) blocks += unreferenced_[g];
  if (found > 0 && total % group.block_size != 0) ++blocks;  // the copy of the last one
  return blocks;
}

// A bound, for engines that ask whether every request can stay.
std::uint64_t GroupedBackend::lacks(const KvRequest&, std::uint64_t tokens) const {
  std::uint64_t blocks = 0;
  for (const KvGroup& group : layout_.groups) blocks += (tokens + group.block_size - 1) / group.block_size + 1;
  return blocks;
}

std::uint64_t GroupedBackend::beyond(const KvHit&, std::uint32_t tokens) const { return layout_.most_blocks(tokens); }

// ── Allocation ──

KvBackend::Room GroupedBackend::place(KvRequest& request, const KvHit& hit, std::uint32_t tokens, std::uint32_t total,
                                      std::int64_t now_ns) {
  const std::uint32_t slots = std::max(hit.tokens, tokens);
  if (need_all(request, hit.tokens, slots, true, false) > takeable()) return Room::Short;
  Record& r = record(request);
  adopt(r, hit.tokens, true);
  Room room = Room::Short;
  try {
    room = reserve(request, r, slots, now_ns);
  } catch (...) {  // user-defined policy
    release(request);
    throw;
  }
  if (room != Room::Taken) {
    release(request);
    return room;
  }
  grow_all(request, r, slots);
  r.computed_before = r.computed_earlier = hit.tokens - std::min(hit.tokens, layout_.replay);
  r.computed = total;
  r.last_tokens = total - r.computed_before;
  r.last_schedule = schedule_;
  remember_keyed(r);
  key(request, std::min(std::max(hit.tokens, total), request.known));
  return Room::Taken;
}

KvBackend::Room GroupedBackend::grow(KvRequest& request, std::uint32_t tokens, std::uint32_t total,
                                     std::int64_t now_ns) {
  Record& r = record(request);
  const std::uint32_t start = r.computed;
  const std::uint32_t in_flight =
      config_.async_scheduling && r.last_schedule + 1 == schedule_ ? std::min(r.last_tokens, start) : 0;
  slide(request, r, start - in_flight);
  if (need_all(request, start, tokens, false, false) > takeable()) return Room::Short;
  if (const Room room = reserve(request, r, tokens, now_ns); room != Room::Taken) return room;
  grow_all(request, r, tokens);
  r.computed_earlier = r.last_schedule + 1 == schedule_ ? r.computed_before : start;
  r.computed_before = start;
  r.computed = total;
  r.last_tokens = total - start;
  r.last_schedule = schedule_;
  remember_keyed(r);
  key(request, std::min(total, request.known));
  return Room::Taken;
}

void GroupedBackend::grow_all(const KvRequest& request, Record& r, std::uint32_t slots) {
  if (slots <= r.room) return;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) grow_table(request, r.groups[g], g, slots);
  held_blocks_.note_peaks();
  update_room(r);
}

void GroupedBackend::update_room(Record& r) const {
  if (layout_.has_states) return;
  std::uint64_t room = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].kind == GroupKind::Circular) continue;
    room = std::min(room, std::uint64_t{r.groups[g].size()} * layout_.groups[g].block_size);
  }
  r.room = static_cast<std::uint32_t>(room);
}

// ── Release ──

// Leave the blocks behind that no later token reads, when `tokens` tokens have been computed.
void GroupedBackend::slide(const KvRequest& request, Record& r, std::uint32_t tokens) {
  if (tokens < r.next_slide) return;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    GroupTable& table = r.groups[g];
    std::size_t end = group.skipped(tokens) / group.block_size;
    if (group.kind == GroupKind::Rswa) {
      const std::uint32_t prompt = request.spec.prompt_tokens;
      end = std::max(prompt, tokens - std::min(tokens, group.window)) / group.block_size;
    }
    end = std::min(end, table.size());
    leave(request, table, g, end);
    table.slid = std::max(table.slid, static_cast<std::uint32_t>(end));
  }
  update_next_slide(r);
}

void GroupedBackend::update_next_slide(Record& r) const {
  if (layout_.has_states || has_rswa_) return;
  std::uint64_t next = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    next = std::min(
        next, layout_.groups[g].tokens_to_skip((std::uint64_t{r.groups[g].slid} + 1) * layout_.groups[g].block_size));
  }
  r.next_slide = static_cast<std::uint32_t>(next);
}

void GroupedBackend::release(KvRequest& request) {
  Record& r = record(request);
  for (std::size_t g = 0; g < r.groups.size(); ++g) {
    GroupTable& table = r.groups[g];
    release_blocks(table, g);
    table.keyed = table.keyed_before = table.slid = 0;
    table.tail = Tail::None;
    table.checkpoint.reset();
  }
  r.computed = r.computed_before = r.last_tokens = 0;
  r.keyed = r.keyed_before = 0;
  r.last_schedule = 0;
  r.room = r.next_slide = r.next_key = 0;
}

bool GroupedBackend::holds(const KvRequest& request) const {
  return request.slot < records_.size() &&
         std::ranges::any_of(records_[request.slot].groups, [](const GroupTable& t) { return t.size() > 0; });
}

void GroupedBackend::remember_keyed(Record& r) {
  r.keyed_before = r.keyed;
  for (GroupTable& table : r.groups) table.keyed_before = table.keyed;
}

void GroupedBackend::withdraw(KvRequest& request, bool keep_matchable) {
  Record& r = record(request);
  if (keep_matchable) return;
  for (GroupTable& table : r.groups) drop_new_keys(table);
  r.keyed = r.keyed_before;
  r.next_key = 0;
  r.computed = r.computed_before;
}

// ── Which blocks get keys, and when: what other requests can find ──

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
    if (group.cacheable()) key_group(request, r, g, n);
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
  if (unit >= tokens / layout_.hash_block || unit >= num_names(waiting)) return false;
  need_names(request, tokens);
  return unit_name(request, unit) == unit_name(waiting, unit);
}

void GroupedBackend::end_event(const KvRequest& request, const GroupTable& table, std::size_t g, std::uint32_t full,
                               GroupEvent event, std::vector<GroupEvent>& out) const {
  const std::uint32_t block = layout_.groups[g].block_size;
  event.stored = true;
  event.group = static_cast<std::uint8_t>(g);
  event.block_size = block;
  event.position = table.keyed * block;
  event.length = (full - table.keyed) * block;
  event.has_parent = table.keyed > 0;
  if (event.has_parent) event.parent = unit_name(request, event.position / layout_.hash_block - 1);
  event.request = request.id;
  event.units = units(request, event);
  out.push_back(std::move(event));
}

std::vector<BlockIdentity> GroupedBackend::units(const KvRequest& request, const GroupEvent& event) const {
  const std::uint32_t unit = layout_.hash_block;
  const auto first = request.blocks.begin() + event.position / unit;
  return {first, first + event.length / unit};
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
