#include "router/holder_sets.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace understudy {

bool HolderSets::contains(SetId id, Holder holder) const noexcept {
  const Chunk wanted = chunk_of(holder);
  for (const Chunk& chunk : chunks(id)) {
    if (chunk.key == wanted.key) return (chunk.bits & wanted.bits) != 0;
  }
  return false;
}

SetId HolderSets::change(SetId from, Holder holder, bool adds) {
  if (contains(from, holder) == adds) return from;
  const Chunk one = chunk_of(holder);
  const auto before = chunks(from);
  scratch_.assign(before.begin(), before.end());
  const auto at = std::ranges::lower_bound(scratch_, one.key, {}, &Chunk::key);
  const bool there = at != scratch_.end() && at->key == one.key;
  if (adds && there) {
    at->bits |= one.bits;
  } else if (adds) {
    scratch_.insert(at, one);
  } else if ((at->bits &= ~one.bits) == 0) {
    scratch_.erase(at);
  }
  const SetId to = scratch_.empty() ? 0 : acquire(scratch_);
  memo_ = {from, holder, to, adds, true};
  if (from != 0) release(from);
  return to;
}

SetId HolderSets::acquire(std::span<const Chunk> chunks) {
  const std::uint32_t hash = hash_of(chunks);
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t at = hash & mask; slots_[at] != 0; at = (at + 1) & mask) {
    const SetId id = slots_[at];
    if (sets_[id].hash == hash && std::ranges::equal(this->chunks(id), chunks)) {
      ++sets_[id].blocks;
      return id;
    }
  }
  if ((count_ + 1) * 2 > slots_.size()) resize(slots_.size() * 2);
  if (free_.empty()) {
    free_.push_back(static_cast<SetId>(sets_.size()));
    sets_.emplace_back();
  }
  const SetId id = free_.back();
  Set& set = sets_[id];
  if (chunks.size() == 1) {
    set.one = chunks[0];
  } else {
    set.many = std::make_unique<Chunk[]>(chunks.size());
    std::ranges::copy(chunks, set.many.get());
  }
  free_.pop_back();
  set.size = static_cast<std::uint32_t>(chunks.size());
  set.hash = hash;
  set.blocks = 1;
  enter(id);
  ++count_;
  return id;
}

void HolderSets::release(SetId id) {
  UNDERSTUDY_ASSERT(sets_[id].blocks > 0, "releases a set that no block has");
  if (--sets_[id].blocks == 0) leave(id);
}

// ── The table of sets ──

std::uint32_t HolderSets::hash_of(std::span<const Chunk> chunks) noexcept {
  std::uint64_t hash = 0;
  for (const Chunk& chunk : chunks) {
    hash = (hash ^ chunk.bits) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ (hash >> 29) ^ chunk.key) * 0xD1B54A32D192ED03u;
  }
  return static_cast<std::uint32_t>(hash >> 32);
}

void HolderSets::enter(SetId id) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t at = sets_[id].hash & mask;
  while (slots_[at] != 0) at = (at + 1) & mask;
  slots_[at] = id;
}

// Moves the entries after it up, so that no search ends too early.
void HolderSets::leave(SetId id) {
  UNDERSTUDY_ASSERT(sets_[id].blocks == 0 && count_ > 0, "drops a set that blocks still have");
  memo_.valid = memo_.valid && memo_.from != id && memo_.to != id;
  const std::size_t mask = slots_.size() - 1;
  std::size_t hole = sets_[id].hash & mask;
  while (slots_[hole] != id) hole = (hole + 1) & mask;
  for (std::size_t at = (hole + 1) & mask; slots_[at] != 0; at = (at + 1) & mask) {
    const std::size_t home = sets_[slots_[at]].hash & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole] = 0;
  sets_[id] = {};
  free_.push_back(id);
  --count_;
  if (count_ == 0) {  // returns the memory of a burst of unusual sets
    sets_ = std::vector<Set>(1);
    free_ = {};
    slots_ = std::vector<SetId>(kFewest, 0);
  } else if (slots_.size() > kFewest && count_ * 16 < slots_.size()) {
    resize(slots_.size() / 4);
  }
}

void HolderSets::resize(std::size_t slots) {
  std::vector<SetId> old(std::max(slots, kFewest), 0);
  old.swap(slots_);
  for (const SetId id : old) {
    if (id != 0) enter(id);
  }
}

std::size_t HolderSets::bytes() const noexcept {
  std::size_t bytes = sets_.capacity() * sizeof(Set) + (free_.capacity() + slots_.capacity()) * sizeof(SetId);
  for (const Set& set : sets_) bytes += set.size > 1 ? set.size * sizeof(Chunk) : 0;
  return bytes;
}

}  // namespace understudy
