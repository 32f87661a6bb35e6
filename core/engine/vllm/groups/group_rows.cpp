#include "engine/vllm/groups/group_rows.hpp"

#include <algorithm>
#include <unordered_set>

#include "base/assert.hpp"
#include "base/errors.hpp"
#include "engine/vllm/groups/chunk_key.hpp"
#include "tiers/group_block.hpp"

namespace understudy {

std::span<const EventRecord> GroupRows::unread() {
  for (const GroupEvent& event : backend_.take_events()) {
    if (event.stored) {
      add_stored(event);
    } else {
      add_removed(event);
    }
  }
  if (host_ != nullptr) host_->read_events([this](std::span<const EventRecord> rows) { add_host(rows); });
  return rows_;
}

void GroupRows::touch(const GroupEvent& event, std::size_t first) const {
  for (std::size_t i = first; i < std::min(event.hashes.size(), first + kBatch); ++i) {
    held_.touch(group_key(event.hashes[i], event.group));
  }
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
      if (named % kBatch == 0) touch(event, named);
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
  for (std::size_t i = 0; i < event.hashes.size(); ++i) {
    if (i % kBatch == 0) touch(event, i);
    const std::uint64_t hash = event.hashes[i];
    const std::uint64_t key = group_key(hash, event.group);
    Held* const held = held_.find(key);
    UNDERSTUDY_ASSERT(held != nullptr, "only stored blocks are removed");
    EventRecord row;
    row.identity.lineage = LineageHash::make(hash, false, 0, held->position);
    row.kind = EventKind::Removed;
    row.generation = held->generation;
    row.group = event.group;
    row.sole = --held->copies == 0;
    row.starts = rows_.empty() || rows_.back().kind != EventKind::Removed || rows_.back().group != event.group;
    if (row.sole) held_.erase(key);
    rows_.push_back(row);
  }
}

void GroupRows::add_host(std::span<const EventRecord> rows) {
  for (const EventRecord& row : rows) host_blocks_ += row.kind == EventKind::Stored ? 1 : ~std::uint64_t{0};
  if (!has_tiers_) return add_chunks(rows);
  const std::size_t begin = rows_.size();
  rows_.insert(rows_.end(), rows.begin(), rows.end());
  split_groups(std::span(rows_).subspan(begin), backend_.layout().groups.size());
}

// Chunks that leave together are one event per group, in the order of the groups' first chunks.
void GroupRows::add_chunks(std::span<const EventRecord> rows) {
  for (std::size_t first = 0, end = 0; first < rows.size(); first = end) {
    const bool removed = rows[first].kind == EventKind::Removed;
    const std::size_t begin = rows_.size();
    for (end = first; end < rows.size() && rows[end].kind == rows[first].kind; ++end) {
      if (end > first && rows[end].starts) break;
      EventRecord& row = rows_.emplace_back(rows[end]);
      row.group = group_of_chunk(row.identity.lineage);
      const std::uint32_t position = row.identity.position();
      row.identity.lineage =
          LineageHash::make(row.identity.sequence_hash(), position > 0, row.identity.parent_hash, position);
    }
    for (auto at = rows_.begin() + static_cast<std::ptrdiff_t>(begin); at != rows_.end();) {
      const auto same = [group = at->group](const EventRecord& row) { return row.group == group; };
      const auto next =
          removed ? std::stable_partition(at, rows_.end(), same) : std::find_if_not(at, rows_.end(), same);
      for (auto row = at; row != next; ++row) row->starts = row == at;
      at = next;
    }
  }
}

std::uint64_t GroupRows::host_key(const BlockIdentity& block) const {
  if (has_tiers_) return block.sequence_hash();
  return group_key(block.sequence_hash(), group_of_chunk(block.lineage));
}

std::vector<std::uint64_t> GroupRows::host_keys() const {
  std::vector<std::uint64_t> keys;
  for (const BlockIdentity& block : host_->resident(1)) keys.push_back(host_key(block));
  return keys;
}

void GroupRows::check() const {
  const std::vector<std::uint64_t> keys = backend_.contents();
  const auto known = [this](std::uint64_t key) { return held_.contains(key); };
  if (keys.size() != held_.size() || !std::ranges::all_of(keys, known)) {
    throw Error(ErrorKind::InvariantViolated, "KV events name ", held_.size(), " keys, and the cache groups have ",
                keys.size(), ", or others");
  }
  if (host_ != nullptr && host_->num_hashes() != host_blocks_) {
    throw Error(ErrorKind::InvariantViolated, "KV events name ", host_blocks_, " blocks of the host, which has ",
                host_->num_hashes());
  }
}

void GroupRows::has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const {
  const std::vector<std::uint64_t> keys = pool == 0 ? std::vector<std::uint64_t>() : host_keys();
  const std::unordered_set<std::uint64_t> below(keys.begin(), keys.end());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::uint64_t key = blocks[i].sequence_hash();
    out[i] = pool == 0 ? held_.contains(key) : below.contains(key);
  }
}

std::vector<BlockIdentity> GroupRows::resident(std::size_t pool) const {
  std::vector<BlockIdentity> out;
  for (const std::uint64_t key : pool == 0 ? backend_.contents() : host_keys()) {
    out.emplace_back().lineage = LineageHash::make(key, false, 0, 0);
  }
  return out;
}

}  // namespace understudy
