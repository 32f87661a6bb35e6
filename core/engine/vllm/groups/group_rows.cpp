#include "engine/vllm/groups/group_rows.hpp"

#include <algorithm>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

std::span<const EventRecord> GroupRows::unread() {
  for (const GroupEvent& event : backend_.take_events()) {
    if (event.stored) {
      add_stored(event);
    } else {
      add_removed(event);
    }
  }
  return rows_;
}

void GroupRows::add_stored(const GroupEvent& event) {
  const std::uint32_t unit = backend_.layout().hash_block;
  std::size_t named = 0;
  bool starts = true;
  for (std::size_t i = 0; i < event.units.size(); ++i) {
    const std::uint64_t end = event.position + (i + 1) * std::uint64_t{unit};
    const bool is_named = named < event.ends.size() && event.ends[named] == end;
    if (!is_named && !ranges_) continue;
    EventRecord row;
    row.identity = event.units[i];
    row.starts = starts;
    row.group = event.group;
    starts = false;
    if (is_named) {
      Held& held = held_[row.key()];
      row.sole = held.copies++ == 0;
      row.generation = held.generation = generation_++;
      held.position = row.identity.position();
      ++named;
    } else {
      row.kind = EventKind::Skipped;
      row.sole = false;
    }
    rows_.push_back(row);
  }
  UNDERSTUDY_ASSERT(named == event.ends.size(), "named blocks end at units of hashing of their event");
}

void GroupRows::add_removed(const GroupEvent& event) {
  for (const std::uint64_t hash : event.hashes) {
    const auto held = held_.find(group_key(hash, event.group));
    UNDERSTUDY_ASSERT(held != held_.end(), "only stored blocks are removed");
    EventRecord row;
    row.identity.lineage = LineageHash::make(hash, false, 0, held->second.position);
    row.kind = EventKind::Removed;
    row.generation = held->second.generation;
    row.group = event.group;
    row.sole = --held->second.copies == 0;
    row.starts = rows_.empty() || rows_.back().kind != EventKind::Removed || rows_.back().group != event.group;
    if (row.sole) held_.erase(held);
    rows_.push_back(row);
  }
}

void GroupRows::check() const {
  const std::vector<std::uint64_t> keys = backend_.contents();
  const auto known = [this](std::uint64_t key) { return held_.contains(key); };
  if (keys.size() != held_.size() || !std::ranges::all_of(keys, known)) {
    throw Error(ErrorKind::InvariantViolated, "KV events name ", held_.size(), " keys, and the cache groups have ",
                keys.size(), ", or others");
  }
}

void GroupRows::has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const {
  for (std::size_t i = 0; i < blocks.size(); ++i) out[i] = held_.contains(blocks[i].sequence_hash());
}

std::vector<BlockIdentity> GroupRows::resident(std::size_t) const {
  std::vector<BlockIdentity> out;
  for (const std::uint64_t key : backend_.contents()) {
    out.emplace_back().lineage = LineageHash::make(key, false, 0, 0);
  }
  return out;
}

}  // namespace understudy
