// Reports of the store: counters, events, a dump and a self-check.
#include <unordered_map>

#include "store/block_pool.hpp"
#include "store/block_store.hpp"

namespace understudy {

namespace {

const char* name_of(SlotState state) {
  constexpr const char* kNames[] = {"reset", "mutable", "staged", "claimed", "primary", "duplicate", "inactive"};
  return kNames[static_cast<std::size_t>(state)];
}

}  // namespace

PoolMetrics BlockStore::metrics(std::size_t pool_index) const {
  const Lock lock(*this);
  const Pool& pool = *pools_[pool_index];
  PoolMetrics out = pool.counters;
  out.total_blocks = pool.count;
  out.reset_blocks = pool.in(SlotState::Reset);
  out.mutable_blocks = pool.in(SlotState::Mutable);
  out.staged_blocks = pool.in(SlotState::Staged) + pool.in(SlotState::Claimed);
  out.active_blocks = pool.in(SlotState::Primary) + pool.in(SlotState::Duplicate);
  out.inactive_blocks = pool.in(SlotState::Inactive);
  out.active_references = pool.references;
  return out;
}

void BlockStore::note_leak(std::size_t pool_index) {
  const Lock lock(*this);
  ++pools_[pool_index]->counters.leaked_guards;
}

DrainedEvents BlockStore::drain_events(std::size_t limit) {
  const Lock lock(*this);
  return events_.drain(limit);
}

std::size_t BlockStore::num_events() const {
  const Lock lock(*this);
  return events_.size();
}

std::size_t BlockStore::num_hashes() const {
  const Lock lock(*this);
  std::size_t hashes = 0;
  for (const auto& pool : pools_) hashes += pool->map.count() - pool->in(SlotState::Claimed);
  return hashes;
}

std::vector<BlockIdentity> BlockStore::resident(std::size_t pool_index) const {
  const Lock lock(*this);
  const Pool& pool = *pools_[pool_index];
  std::vector<BlockIdentity> out;
  for (SlotId id = pool.first; id < pool.used_end(); ++id) {
    const Slot& slot = slots_[id];
    const bool only = slot.registered() && !slot.twinned;
    if (only || (slot.registered() && pool.map.find(slot.lineage) == id)) {
      out.push_back(identity(id));
    }
  }
  return out;
}

std::vector<BlockIdentity> BlockStore::resident(std::size_t pool_index, bool active) const {
  const Lock lock(*this);
  const Pool& pool = *pools_[pool_index];
  std::vector<BlockIdentity> out;
  for (SlotId id = pool.first; id < pool.used_end(); ++id) {
    const Slot& slot = slots_[id];
    if (!slot.registered() || (slot.twinned && pool.map.find(slot.lineage) != id)) continue;
    bool referenced = slot.refs > 0;
    if (slot.twinned) {
      for (SlotId copy = details_[id].twin_next; copy != id; copy = details_[copy].twin_next)
        referenced = referenced || slots_[copy].refs > 0;
    }
    if (referenced == active) out.push_back(identity(id));
  }
  return out;
}

std::vector<SlotId> BlockStore::eviction_order(std::size_t pool_index, std::size_t limit) const {
  const Lock lock(*this);
  const Pool& pool = *pools_[pool_index];
  if (pool.advised != nullptr) {
    throw Error(ErrorKind::WrongState, "the order of this pool is known to its policy alone");
  }
  std::vector<SlotId> order = pool.policy->order(limit);
  for (SlotId& id : order) id -= pool.first;
  return order;
}

std::vector<BlockIdentity> BlockStore::next_evicted(std::size_t pool, std::size_t slots) const {
  std::vector<BlockIdentity> blocks;
  for (const SlotId local : eviction_order(pool, slots)) {
    const SlotId id = pools_[pool]->first + local;
    if (slots_[id].registered()) blocks.push_back(identity(id));
  }
  return blocks;
}

unsigned BlockStore::frequency(const LineageHash& lineage) const {
  const Lock lock(*this);
  return sketch_ ? sketch_->estimate(lineage) : 0;
}

std::size_t BlockStore::memory_bytes() const {
  const Lock lock(*this);
  std::size_t total = sketch_ ? sketch_->memory_bytes() : 0;
  for (const auto& pool : pools_) {
    const bool detailed = pool->used() > 0 && pool->first < details_.size();
    total += pool->used() * (sizeof(Slot) + (detailed ? sizeof(SlotDetail) : 0));
    if (tokens_.size() > 0) total += pool->used() * block_size_ * sizeof(Token);
    total += pool->buckets.size() * sizeof(BlockIndex::Bucket) + pool->policy->memory_bytes();
  }
  return total;
}

std::uint64_t BlockStore::operations() const {
  const Lock lock(*this);
  std::uint64_t total = 0;
  for (const auto& pool : pools_) total += pool->map.probes() + pool->policy->steps();
  return total;
}

std::string BlockStore::dump() const {
  const Lock lock(*this);
  std::string out;
  append_text(out, "events ", events_.size(), " next ", events_.next_id(), " generation ", next_generation_, '\n');
  for (const auto& pool : pools_) {
    const PoolMetrics& m = pool->counters;
    append_text(out, "tier G", static_cast<int>(pool->config.tier), " references ", pool->references, " counters");
    for (const std::uint64_t counter :
         {m.allocations, m.allocations_from_reset, m.evictions, m.stagings, m.registrations, m.duplicate_blocks,
          m.registration_dedup, m.match_hashes_requested, m.match_blocks_returned, m.scan_hashes_requested,
          m.scan_blocks_returned, m.leaked_guards}) {
      append_text(out, ' ', counter);
    }
    out += '\n';
    if (pool->advised == nullptr) {
      out += "order";
      for (const SlotId id : pool->policy->order(pool->count)) append_text(out, ' ', id - pool->first);
      out += '\n';
    }
    for (SlotId id = pool->first; id < pool->first + pool->count; ++id) {
      const Slot& slot = slots_[id];
      append_text(out, id - pool->first, ' ', name_of(slot.state), " refs ", slot.refs);
      if (slot.refs > 0 && slot.reset_on_release) out += " reset-on-release";
      if (slot.state >= SlotState::Staged) {
        const BlockIdentity block = identity(id);
        append_text(out, " lineage ", Hex{block.lineage.hi}, ':', Hex{block.lineage.lo}, " local ",
                    Hex{block.local_hash}, " parent ", Hex{block.parent_hash}, " generation ",
                    id < details_.size() ? details_[id].generation : 0, " uses ",
                    sketch_ ? sketch_->estimate(block.lineage) : 0);
      }
      out += '\n';
    }
  }
  return out;
}

void BlockStore::check() const {
  const Lock lock(*this);
  const auto require = [](bool ok, const auto&... what) {
    if (!ok) throw Error(ErrorKind::InvariantViolated, what...);
  };
  for (const auto& pool : pools_) {
    const std::vector<SlotId> order = pool->policy->order_of_used(pool->used() + 1);
    std::vector<bool> ordered(pool->used(), false);
    for (const SlotId id : order) {
      require(id >= pool->first && id < pool->used_end(), "the policy orders a foreign slot ", id);
      require(!ordered[id - pool->first], "the policy orders slot ", id, " twice");
      ordered[id - pool->first] = true;
    }
    std::size_t hashes = 0;
    std::array<std::uint64_t, 7> seen{};
    std::uint64_t references = 0;
    std::unordered_map<SlotId, std::uint32_t> keep_alives;
    seen[static_cast<std::size_t>(SlotState::Reset)] = pool->policy->fresh();
    for (SlotId id = pool->first; id < pool->used_end(); ++id) {
      const Slot& slot = slots_[id];
      require(!slot.marked, "slot ", id, " carries scratch state");
      if (ordered[id - pool->first] && slot.state == SlotState::Mutable &&
          slot.refs == 1) {  // handed back: its state is stale
        ++seen[static_cast<std::size_t>(SlotState::Reset)];
        continue;
      }
      ++seen[static_cast<std::size_t>(slot.state)];
      require(slot.available() || !ordered[id - pool->first], "the policy orders slot ", id, " which is ",
              name_of(slot.state));
      require(slot.available() == (slot.refs == 0), "slot ", id, " is ", name_of(slot.state), " with ", slot.refs,
              " references");
      if (slot.state == SlotState::Claimed) {
        const std::uint32_t tag = BlockIndex::tag(slot.lineage);
        require(pool->map.find_claim(slot.lineage, tag) == id, "slot ", id, " claims what the index lacks");
        ++hashes;
      }
      if (slot.state == SlotState::Staged || slot.state == SlotState::Claimed) {
        require(slot.refs == 1, "slot ", id, " has ", slot.refs, " owners");
      }
      if (!slot.registered()) continue;
      references += slot.refs;
      const SlotId head = pool->map.find(slot.lineage);
      require(head != kNoSlot, "slot ", id, " is registered but not in the index");
      if (id >= details_.size()) {
        require(!slot.twinned && head == id, "slot ", id, " is one of several copies in a pool without");
        ++hashes;
        continue;
      }
      const SlotDetail& detail = details_[id];
      require(
          !slot.twinned || (details_[detail.twin_next].twin_prev == id && details_[detail.twin_prev].twin_next == id),
          "slot ", id, " has a broken ring of copies");
      require(slot.twinned || head == id, "slot ", id, " is one of several copies and does not know");
      require(details_[head].generation == detail.generation, "copies of one hash differ in generation at slot ", id);
      if (head == id) ++hashes;
      if (pool->config.duplicates != DuplicatePolicy::Keep) {
        require((head == id) == (slot.state != SlotState::Duplicate), "slot ", id, " is a second primary");
        if (slot.state == SlotState::Duplicate) ++keep_alives[head];
      }
      if (slot.state == SlotState::Duplicate) {
        require(pool->config.duplicates == DuplicatePolicy::Allow, "slot ", id, " is a duplicate in a pool without");
        require(slots_[head].state == SlotState::Primary, "the primary of duplicate ", id, " is not alive");
      }
    }
    for (const auto& [head, count] : keep_alives) {
      require(slots_[head].refs >= count, "primary ", head, " is kept alive by more duplicates than references");
    }
    require(seen == pool->in_state, "state counts of tier G", static_cast<int>(pool->config.tier), " are off");
    require(hashes == pool->map.count(), "the index holds ", pool->map.count(), " hashes, the slots ", hashes);
    require(references == pool->references, "references are ", references, ", counted ", pool->references);
    if (pool->advised != nullptr) continue;
    require(order.size() + pool->policy->fresh() == pool->available(), "the policy orders ", order.size(), " and ",
            pool->policy->fresh(), " fresh slots of ", pool->available());
  }
}

}  // namespace understudy
