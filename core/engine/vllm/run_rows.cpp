#include "engine/vllm/run_rows.hpp"

#include <algorithm>
#include <unordered_set>

namespace understudy {

namespace {

BlockIdentity of_name(BlockName name) { return {LineageHash::pack(name, 0, 0, LineageHash::fragment_bits(0)), 0, 0}; }

}  // namespace

RunRows::RunRows(const EngineConfig& config, BlockPool& pool, BlockStore* host)
    : pool_(pool),
      host_(host),
      tracks_(Announcer::wanted(config) && config.check),
      details_(Announcer::wanted(config) && !Announcer::names_only(config) ? pool.num_blocks() : 0) {
  if (Announcer::wanted(config)) pool.set_listener(this);
}

void RunRows::stored(std::span<const SlotId> ids, std::span<const BlockName> names, std::uint32_t position) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (wants_identities()) details_[ids[i]] = {identities_[position + i], next_generation_++};
    if (tracks_) names_[names[i]] = true;
    add(EventKind::Stored, ids[i], names[i], true);
  }
}

void RunRows::copied(SlotId id, BlockName name, std::uint32_t position, SlotId earliest) {
  if (wants_identities()) details_[id] = {identities_[position], details_[earliest].generation};
  add(EventKind::Stored, id, name, false);
}

void RunRows::removed(SlotId id, BlockName name, std::uint8_t, bool last) {
  if (tracks_ && last) names_.erase(name);
  add(EventKind::Removed, id, name, last);
}

void RunRows::add(EventKind kind, SlotId id, BlockName name, bool sole) {
  EventRecord row;
  row.id = next_id_++;
  row.kind = kind;
  row.starts = starts_;
  row.sole = sole;
  if (wants_identities()) {
    row.identity = details_[id].identity;
    row.generation = details_[id].generation;
  } else {
    row.identity = of_name(name);
  }
  rows_.push_back(row);
  starts_ = false;
}

void RunRows::read_host() {
  if (host_ == nullptr) return;
  host_->read_events([this](std::span<const EventRecord> rows) {
    for (const EventRecord& given : rows) {
      EventRecord& row = rows_.emplace_back(given);
      row.id = next_id_++;
      if (!wants_identities()) continue;
      const std::uint64_t name = row.identity.sequence_hash();  // of one block there
      std::uint64_t& generation = host_generations_[name];
      if (row.kind == EventKind::Stored) generation = next_generation_++;
      row.generation = generation;
      if (row.kind == EventKind::Removed) host_generations_.erase(name);
    }
  });
}

void RunRows::has_blocks(std::size_t pool, std::span<const BlockIdentity> blocks, bool* out) const {
  if (pool > 0) return host_->has_blocks(pool, blocks, out);
  looked_up_ += blocks.size();
  if (tracks_) {
    std::ranges::transform(blocks, out, [this](const BlockIdentity& b) { return names_.contains(b.sequence_hash()); });
    return;
  }
  const std::vector<BlockName> names = pool_.contents();
  const std::unordered_set<BlockName> here(names.begin(), names.end());
  std::ranges::transform(blocks, out, [&](const BlockIdentity& b) { return here.contains(b.sequence_hash()); });
}

std::vector<BlockIdentity> RunRows::resident(std::size_t pool) const {
  if (pool > 0) return host_->resident(pool);
  std::vector<BlockIdentity> out;
  for (const BlockName name : pool_.contents()) out.push_back(of_name(name));
  return out;
}

}  // namespace understudy
