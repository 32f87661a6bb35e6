// Blocks that a request needs, takes and leaves behind, group by group.
#include <algorithm>
#include <iterator>
#include <limits>

#include "base/assert.hpp"
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
    blocks += layout_.groups[g].state() ? need_state(request, r, g, total, slots, admission, whole)
                                        : need(request, r, g, total, slots, admission, whole);
  }
  return blocks;
}

// Blocks for `slots` tokens, of which `total` are computed or found.
std::uint64_t GroupedBackend::need(const KvRequest&, Record& r, std::size_t g, std::uint32_t total, std::uint32_t slots,
                                   bool admission, bool whole) {
  const KvGroup& group = layout_.groups[g];
  const std::vector<SlotId>& table = r.groups[g].blocks;
  if (group.kind == GroupKind::Circular) return table.empty() ? 1 : 0;
  std::uint32_t want = ceil_div(slots, group.block_size);
  if (whole && layout_.caps[g]) want = std::min(want, *layout_.caps[g]);
  const std::uint32_t gone = group.skipped(total) / group.block_size;
  const std::size_t found = admission ? hits_[g].size() : 0;
  const std::size_t there = std::max<std::size_t>(gone, found + table.size());
  std::uint64_t blocks = want - std::min<std::size_t>(want, there);
  if (admission) blocks += unreferenced_[g];
  if (found > 0 && total % group.block_size != 0) ++blocks;  // the copy of the last one
  return blocks;
}

std::uint64_t GroupedBackend::need_state(const KvRequest& request, Record& r, std::size_t g, std::uint32_t total,
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
  if (need_all(request, hit.tokens, slots, true, false) > pool_.num_free() + held()) return Room::Short;
  Record& r = record(request);
  adopt(r, hit.tokens, true);
  if (tiers_ != nullptr) {
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
  if (need_all(request, start, tokens, false, false) > pool_.num_free() + held()) return Room::Short;
  if (tiers_ != nullptr) {
    if (const Room room = reserve(request, r, tokens, now_ns); room != Room::Taken) return room;
  }
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

// Reference the blocks of the last find, for a request that has `total` tokens then.
void GroupedBackend::adopt(Record& r, std::uint32_t total, bool copies_tail) {
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
    table.keyed = table.found = static_cast<std::uint32_t>(table.blocks.size());
    if (!copies_tail || hits.empty() || total % group.block_size == 0) continue;
    table.keyed = total / group.block_size;
    table.tail = Tail::Found;
  }
}

void GroupedBackend::grow_all(const KvRequest& request, Record& r, std::uint32_t slots) {
  if (slots <= r.room) return;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    GroupTable& table = r.groups[g];
    if (group.kind == GroupKind::Circular) {
      take_up_to(table, g, 1);
    } else if (group.state()) {
      grow_state(request, table, g, slots);
    } else {
      copy_tail(request, table, g);
      take_up_to(table, g, ceil_div(slots, group.block_size));
    }
  }
  UNDERSTUDY_ASSERT(reserved_.empty(), "more blocks were reserved than are taken");
  held_blocks_.note_peaks();
  update_room(r);
}

void GroupedBackend::update_room(Record& r) const {
  if (layout_.has_states) return;
  std::uint64_t room = std::numeric_limits<std::uint32_t>::max();
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    if (layout_.groups[g].kind == GroupKind::Circular) continue;
    room = std::min(room, std::uint64_t{r.groups[g].blocks.size()} * layout_.groups[g].block_size);
  }
  r.room = static_cast<std::uint32_t>(room);
}

void GroupedBackend::grow_state(const KvRequest& request, GroupTable& table, std::size_t g, std::uint32_t slots) {
  const std::size_t want = ceil_div(slots, layout_.groups[g].block_size);
  if (want <= table.blocks.size() && table.tail == Tail::None && !table.checkpoint) return;
  copy_tail(request, table, g);
  const std::size_t last = table.checkpoint ? 2 : 1;  // entries that get a block
  if (want > last && table.blocks.size() < want - last) table.blocks.resize(want - last, kNoSlot);
  take_up_to(table, g, want);
}

void GroupedBackend::take_up_to(GroupTable& table, std::size_t g, std::size_t size) {
  const std::size_t held = table.blocks.size();
  if (size <= held) return;
  table.blocks.resize(size);
  const std::span<SlotId> fresh = std::span(table.blocks).subspan(held);
  take(fresh);
  held_blocks_.add_free(g, fresh);
}

// With tiers: of the blocks that `reserve` has allocated.
void GroupedBackend::take(std::span<SlotId> out) {
  if (tiers_ == nullptr) return pool_.take(out);
  UNDERSTUDY_ASSERT(out.size() <= reserved_.size(), "more blocks are taken than were reserved");
  const auto end = reserved_.begin() + std::ssize(out);
  std::copy(reserved_.begin(), end, out.begin());
  reserved_.erase(reserved_.begin(), end);
}

// The request goes on in a copy: of a block that others may use, or (its own state) of one that stays cached.
void GroupedBackend::copy_tail(const KvRequest& request, GroupTable& table, std::size_t g) {
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

// ── Release ──

// Leave the blocks behind that no later token reads, when `tokens` tokens have been computed.
void GroupedBackend::slide(const KvRequest& request, Record& r, std::uint32_t tokens) {
  if (tokens < r.next_slide) return;
  for (std::size_t g = 0; g < layout_.groups.size(); ++g) {
    const KvGroup& group = layout_.groups[g];
    GroupTable& table = r.groups[g];
    std::size_t first = 0;
    std::size_t end = group.skipped(tokens) / group.block_size;
    if (group.kind == GroupKind::Rswa) {
      const std::uint32_t prompt = request.spec.prompt_tokens;
      first = ceil_div(prompt, group.block_size);
      end = std::max(prompt, tokens - std::min(tokens, group.window)) / group.block_size;
    } else if (group.state()) {
      first = table.slid;
    }
    end = std::min(end, table.blocks.size());
    if (group.slides()) {
      first = end;
      while (first > 0 && table.blocks[first - 1] != kNoSlot) --first;
      if (first < end) leave(table, g, first, end);
      table.slid = std::max(table.slid, static_cast<std::uint32_t>(end));
      continue;
    }
    freed_.clear();
    for (std::size_t i = end; i-- > first;) {
      if (table.blocks[i] == kNoSlot) {
        if (group.state()) continue;
        break;
      }
      freed_.push_back(table.blocks[i]);
      table.blocks[i] = kNoSlot;
    }
    table.slid = std::max(table.slid, static_cast<std::uint32_t>(end));
    held_blocks_.remove(g, freed_, pool_.release(freed_));
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

// Release the entries of a window that it has left behind, from the last one down. Most of them never had a key.
void GroupedBackend::leave(GroupTable& table, std::size_t g, std::size_t first, std::size_t end) {
  const auto entries = std::span(table.blocks);
  std::size_t freed = 0;
  const auto release_keyed = [&](std::size_t from, std::size_t to) {
    freed_.assign(table.blocks.rend() - static_cast<std::ptrdiff_t>(to),
                  table.blocks.rend() - static_cast<std::ptrdiff_t>(from));
    freed += pool_.release(freed_);
  };
  const auto release_empty = [&](std::size_t from, std::size_t to) {
    pool_.release_empty(entries.subspan(from, to - from));
    freed += to - from;
  };
  const std::size_t found = std::clamp<std::size_t>(table.found, first, end);
  const std::size_t named = std::clamp<std::size_t>(table.first_named, found, end);
  const std::size_t unnamed = std::clamp<std::size_t>(table.end_named, named, end);
  // Blocks without a key are handed out again from the last released on, those with one from the first.
  if (first < found && named < unnamed) {
    release_keyed(first, end);
  } else {
    if (first < found) release_keyed(first, found);
    release_empty(found, named);
    if (named < unnamed) release_keyed(named, unnamed);
    release_empty(unnamed, end);
  }
  held_blocks_.remove(g, entries.subspan(first, end - first), freed);
  std::ranges::fill(entries.subspan(first, end - first), kNoSlot);
}

void GroupedBackend::release(KvRequest& request) {
  Record& r = record(request);
  forget_states(request);
  for (std::size_t g = 0; g < r.groups.size(); ++g) {
    GroupTable& table = r.groups[g];
    freed_.clear();
    const std::size_t first = layout_.groups[g].full() ? 0 : table.slid;  // leading entries are null
    for (std::size_t i = table.blocks.size(); i-- > first;) {
      if (table.blocks[i] != kNoSlot) freed_.push_back(table.blocks[i]);
    }
    held_blocks_.remove(g, freed_, pool_.release(freed_));
    table.blocks.clear();
    table.keyed = table.keyed_before = table.slid = 0;
    table.found = table.end_named = 0;
    table.first_named = ~std::uint32_t{0};
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
         std::ranges::any_of(records_[request.slot].groups, [](const GroupTable& t) { return !t.blocks.empty(); });
}

KvTable GroupedBackend::detach(KvRequest& request) {
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

void GroupedBackend::release_table(KvTable table) {
  freed_.assign(table.ids.rbegin(), table.ids.rend());
  pool_.release(freed_);
}

}  // namespace understudy
