// Locates blocks for copies: what is there, what is on its way, what is missing.
#include <algorithm>

#include "store/block_pool.hpp"
#include "store/block_store.hpp"
#include "store/lookup.hpp"

namespace understudy {

namespace {

[[noreturn]] void refuse_tags(std::size_t blocks, std::size_t tags) {
  throw Error(ErrorKind::InvalidArgument, blocks, " blocks have ", tags, " tags");
}

// Finds the leading run of `identities` that is there; it is mostly empty or in adjacent slots.
std::size_t leading(const BlockIndex& index, NeighbourGuess neighbour, std::span<const BlockIdentity> identities,
                    SlotId first, std::vector<SlotId>& held) {
  std::size_t count = 0;
  for (; count < identities.size(); ++count) {
    const LineageHash& lineage = identities[count].lineage;
    SlotId id = neighbour.find(lineage);
    if (id == kNoSlot) {
      const std::uint32_t tag = BlockIndex::tag(lineage);
      id = index.might_hold(tag) ? index.find(lineage, tag) : kNoSlot;
      if (id == kNoSlot) break;
      neighbour.found(id);
    }
    held.push_back(id - first);
  }
  return count;
}

}  // namespace

void BlockStore::warm(std::size_t pool, std::span<const BlockIdentity> identities) const {
  const Lock lock(*this);
  for (const BlockIdentity& identity : identities) pools_[pool]->map.warm(BlockIndex::tag(identity.lineage));
}

void BlockStore::compute_tags(std::span<const BlockIdentity> identities, std::span<std::uint32_t> tags) const {
  if (tags.size() != identities.size()) refuse_tags(identities.size(), tags.size());
  const Lock lock(*this);
  for (std::size_t i = 0; i < tags.size(); ++i) tags[i] = BlockIndex::tag(identities[i].lineage);
  for (const auto& pool : pools_) {
    const BlockIndex index = pool->map;
    for (const std::uint32_t tag : tags) index.warm(tag);
  }
}

void BlockStore::locate(std::size_t pool_index, std::span<const BlockIdentity> identities,
                        std::span<const std::uint32_t> tags, SlotId* out, SlotId* claimed) const {
  if (tags.size() != identities.size()) refuse_tags(identities.size(), tags.size());
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  BlockIndex index = pool.map;  // stays in registers
  NeighbourGuess neighbour(slots_.get(), pool.first, pool.count);
  const bool may_come = pool.in(SlotState::Claimed) > 0;
  for (std::size_t i = 0; i < identities.size(); ++i) {
    const LineageHash& lineage = identities[i].lineage;
    out[i] = claimed[i] = kNoSlot;
    SlotId id = neighbour.find(lineage);
    if (id == kNoSlot) {
      if (!index.might_hold(tags[i])) continue;
      id = index.find(lineage, tags[i]);
      if (id != kNoSlot) neighbour.found(id);
    }
    if (id != kNoSlot) {
      out[i] = id - pool.first;
    } else if (const SlotId claim = may_come ? index.find_claim(lineage, tags[i]) : kNoSlot; claim != kNoSlot) {
      claimed[i] = claim - pool.first;
    }
  }
  pool.map = index;  // updates the count of probes
}

std::size_t BlockStore::locate_run(std::size_t pool_index, std::span<const BlockIdentity> identities, SlotId* out,
                                   SlotId* claimed) const {
  Pool& pool = *pools_[pool_index];
  const Lock lock(*this);
  BlockIndex index = pool.map;
  NeighbourGuess neighbour(slots_.get(), pool.first, pool.count);
  std::size_t seen = 0;
  for (bool there = true; there && seen < identities.size(); ++seen) {
    const LineageHash& lineage = identities[seen].lineage;
    out[seen] = claimed[seen] = kNoSlot;
    SlotId id = neighbour.find(lineage);
    if (id == kNoSlot) {
      const std::uint32_t tag = BlockIndex::tag(lineage);
      id = index.find(lineage, tag);
      if (id == kNoSlot) {
        const SlotId claim = index.find_claim(lineage, tag);
        there = claim != kNoSlot;
        if (there) claimed[seen] = claim - pool.first;
        continue;
      }
      neighbour.found(id);
    }
    out[seen] = id - pool.first;
  }
  pool.map = index;
  return seen;
}

// Most often all blocks are missing, which one line of the index shows.
void BlockStore::locate(std::size_t pool_index, std::span<const BlockIdentity> identities,
                        std::span<std::uint32_t> tags, bool known, std::vector<std::uint32_t>& missing,
                        std::vector<SlotId>& held) const {
  Pool& pool = *pools_[pool_index];
  const std::size_t count = identities.size();
  if (tags.size() != count) refuse_tags(count, tags.size());
  const Lock lock(*this);
  missing.resize(count);
  held.clear();
  // Local copies stay in registers.
  BlockIndex index = pool.map;
  std::uint32_t* const all_tags = tags.data();
  std::uint32_t* next = missing.data();
  const BlockIdentity* const blocks = identities.data();
  const auto prefetch = [&](std::size_t from, std::size_t to) {
    if (known) return;  // and the bucket is prefetched already
    for (std::size_t i = from; i < to; ++i) {
      all_tags[i] = BlockIndex::tag(blocks[i].lineage);
      index.warm(all_tags[i]);
    }
  };
  std::size_t asked = std::min(kTagBatch, count);
  prefetch(0, asked);
  std::size_t start =
      known ? 0 : leading(index, NeighbourGuess(slots_.get(), pool.first, pool.count), identities, pool.first, held);
  prefetch(asked = std::max(asked, start), std::min(start + kTagBatch, count));
  while (start < count) {
    const std::size_t end = std::min(start + kTagBatch, count);
    const std::size_t ahead = std::min(end + kTagBatch, count);
    prefetch(asked = std::max(asked, end), ahead);
    asked = ahead;
    for (; start < end; ++start) {
      *next = static_cast<std::uint32_t>(start);
      if (!index.might_hold(all_tags[start])) {
        ++next;
      } else if (const SlotId id = index.find(blocks[start].lineage, all_tags[start]); id != kNoSlot) {
        held.push_back(id - pool.first);
      } else if (index.find_claim(blocks[start].lineage, all_tags[start]) == kNoSlot) {
        ++next;
      }
    }
  }
  pool.map = index;  // updates the count of probes
  missing.resize(static_cast<std::size_t>(next - missing.data()));
}

}  // namespace understudy
