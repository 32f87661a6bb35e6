#include "router/block_table.hpp"

#include <algorithm>

namespace understudy {

BlockTable::Entry& BlockTable::find_or_make(std::uint64_t hash) {
  Place from = place(hash);
  Shard& shard = shards_[from.shard];
  // Small ones are full at a half and double; large ones must not stand that empty.
  const std::size_t size = shard.entries.size();
  if (size < kLarge ? (shard.used + 1) * 2 > size : (shard.used + 1) * 3 > size * 2) {
    if (Entry* known = find(hash)) return *known;
    resize(shard, std::max(kFewest, size < kLarge ? 2 * size : size + size / 3));
    from = place(hash);
  }
  for (std::size_t at = from.at;; at = at + 1 == shard.entries.size() ? 0 : at + 1) {
    Entry& entry = shard.entries[at];
    if (entry.set == 0) {
      entry.hash = hash;
      entry.extra = 0;
      ++shard.used;
      ++size_;
      return entry;
    }
    if (entry.hash == hash) return entry;
  }
}

void BlockTable::erase(Entry* entry) noexcept {
  Shard& shard = shards_[place(entry->hash).shard];
  erase(shard, static_cast<std::size_t>(entry - shard.entries.data()));
}

void BlockTable::erase(Shard& shard, std::size_t hole) noexcept {
  const std::size_t size = shard.entries.size();
  const auto distance = [size](std::size_t from, std::size_t to) { return to >= from ? to - from : to + size - from; };
  for (std::size_t at = hole + 1 == size ? 0 : hole + 1; shard.entries[at].set != 0; at = at + 1 == size ? 0 : at + 1) {
    if (distance(place(shard.entries[at].hash).at, at) < distance(hole, at)) continue;
    shard.entries[hole] = shard.entries[at];
    hole = at;
  }
  shard.entries[hole].set = 0;
  --shard.used;
  --size_;
}

void BlockTable::shrink() {
  for (Shard& shard : shards_) {
    if (shard.entries.size() > kFewest && shard.used * 8 < shard.entries.size()) {
      resize(shard, std::max(kFewest, shard.used * 3));
    }
  }
}

void BlockTable::resize(Shard& shard, std::size_t capacity) {
  PageArray<Entry> old = std::exchange(shard.entries, PageArray<Entry>(capacity));
  for (std::size_t i = 0; i < old.size(); ++i) {
    if (old[i].set == 0) continue;
    std::size_t at = place(old[i].hash).at;
    while (shard.entries[at].set != 0) at = at + 1 == capacity ? 0 : at + 1;
    shard.entries[at] = old[i];
  }
}

std::size_t BlockTable::bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.entries.bytes();
  return bytes;
}

}  // namespace understudy
