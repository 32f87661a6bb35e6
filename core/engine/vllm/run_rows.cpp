#include "engine/vllm/run_rows.hpp"

#include <algorithm>
#include <unordered_set>

namespace understudy {

namespace {

BlockIdentity of_name(BlockName name) { return {LineageHash::pack(name, 0, 0, LineageHash::fragment_bits(0)), 0, 0}; }

}  // namespace

RunRows::RunRows(const EngineConfig& config, BlockPool& pool)
    : pool_(pool),
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

void RunRows::removed(SlotId id, BlockName name, bool last) {
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

void RunRows::has_blocks(std::size_t, std::span<const BlockIdentity> blocks, bool* out) const {
  looked_up_ += blocks.size();
  if (tracks_) {
    std::ranges::transform(blocks, out, [this](const BlockIdentity& b) { return names_.contains(b.sequence_hash()); });
    return;
  }
  const std::vector<BlockName> names = pool_.contents();
  const std::unordered_set<BlockName> here(names.begin(), names.end());
  std::ranges::transform(blocks, out, [&](const BlockIdentity& b) { return here.contains(b.sequence_hash()); });
}

std::vector<BlockIdentity> RunRows::resident(std::size_t) const {
  std::vector<BlockIdentity> out;
  for (const BlockName name : pool_.contents()) out.push_back(of_name(name));
  return out;
}

}  // namespace understudy
