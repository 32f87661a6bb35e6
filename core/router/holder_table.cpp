#include "router/holder_table.hpp"

#include <algorithm>
#include <vector>

#include "base/assert.hpp"
#include "base/errors.hpp"

namespace understudy {

HolderTable::Entry HolderTable::find(std::uint64_t hash) const noexcept {
  const Place from = place(hash);
  const Shard& shard = shards_[from.shard];
  if (shard.used == 0) return {};
  std::size_t at = from.at;
  do {
    auto* const bucket = const_cast<Bucket*>(&shard.buckets[at]);
    if (const std::size_t lane = lane_of(*bucket, hash); lane < kLanes) return {bucket, lane};
    if (bucket->guests_elsewhere == 0) return {};
    at = next(shard, at);
  } while (at != from.at);  // every bucket may have guests elsewhere
  return {};
}

HolderTable::Entry HolderTable::find_or_make(std::uint64_t hash) {
  if (const Entry known = find(hash)) return known;
  Shard& shard = shards_[place(hash).shard];
  // Large shards grow by less: their empty space costs more.
  const std::size_t buckets = shard.buckets.size();
  if (full(shard)) {
    resize(shard, std::max(kFewest, buckets + buckets / (buckets < kLarge ? 2 : 3)));
  }
  ++size_;
  ++shard.used;
  return put(shard, place(hash).at, hash);
}

// Inserts a hash that is absent; there is room.
HolderTable::Entry HolderTable::put(Shard& shard, std::size_t home, std::uint64_t hash) noexcept {
  for (std::size_t at = home;; at = next(shard, at)) {
    Bucket& bucket = shard.buckets[at];
    if (const std::size_t lane = free_lane(bucket); lane < kLanes) {
      bucket.hashes[lane] = hash;
      return {&bucket, lane};
    }
    ++bucket.guests_elsewhere;
  }
}

void HolderTable::remove_guest(Entry entry, Place home) noexcept {
  Shard& shard = shards_[home.shard];
  for (std::size_t at = home.at; &shard.buckets[at] != entry.bucket_; at = next(shard, at)) {
    UNDERSTUDY_ASSERT(shard.buckets[at].guests_elsewhere > 0, "a bucket has lost count of its guests");
    --shard.buckets[at].guests_elsewhere;
  }
}

void HolderTable::shrink() {
  if (erased_ < kCheckAfter && size_ > 0) return;
  erased_ = 0;
  for (Shard& shard : shards_) {
    if (shard.buckets.size() > kFewest && shard.used * 2 < shard.buckets.size()) {
      resize(shard, std::max(kFewest, shard.used / 2));
    }
  }
}

void HolderTable::resize(Shard& shard, std::size_t buckets) {
  ++moves_;
  const PageArray<Bucket> old = std::exchange(shard.buckets, PageArray<Bucket>(buckets));
  for (std::size_t i = 0; i < old.size(); ++i) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (old[i].sets[lane] == 0) continue;
      put(shard, place(old[i].hashes[lane]).at, old[i].hashes[lane]).set(old[i].sets[lane]);
    }
  }
}

std::size_t HolderTable::bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.buckets.bytes();
  return bytes;
}

void HolderTable::check() const {
  for (const Shard& shard : shards_) {
    std::vector<std::uint32_t> guests(shard.buckets.size(), 0);
    std::size_t used = 0;
    for (std::size_t at = 0; at < shard.buckets.size(); ++at) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        if (shard.buckets[at].sets[lane] == 0) continue;
        ++used;
        for (std::size_t past = place(shard.buckets[at].hashes[lane]).at; past != at; past = next(shard, past)) {
          ++guests[past];
        }
      }
    }
    bool right = used == shard.used;
    for (std::size_t at = 0; at < guests.size(); ++at) right &= guests[at] == shard.buckets[at].guests_elsewhere;
    if (!right) throw Error(ErrorKind::InvariantViolated, "a shard of the table has miscounted its blocks");
  }
}

}  // namespace understudy
