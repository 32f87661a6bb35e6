// Flat table under a prefix index: blocks by sequence hash, each with the set of its holders.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/assert.hpp"
#include "router/holder_sets.hpp"
#include "router/page_array.hpp"

namespace understudy {

// Buckets of a cache line each, in shards that resize one at a time, so that no call moves the whole table or needs it
// twice. An entry never moves: a full bucket sends new entries to the next ones and counts them as guests elsewhere,
// and a search continues past a bucket only while it has such guests. So searches and deletions mostly touch one line
// and leave no tombstones.
class HolderTable {
 public:
  static constexpr std::size_t kLanes = 5;
  struct alignas(64) Bucket {
    std::array<std::uint64_t, kLanes> hashes;
    std::array<SetId, kLanes> sets;  // 0: free
    std::uint32_t guests_elsewhere;  // entries whose search passes here
  };
  static_assert(sizeof(Bucket) == 64);

  // Position of an entry; stable until the table grows or shrinks.
  class Entry {
   public:
    Entry() = default;
    Entry(Bucket* bucket, std::size_t lane) noexcept : bucket_(bucket), lane_(lane) {}
    explicit operator bool() const noexcept { return bucket_ != nullptr; }
    bool operator==(const Entry&) const = default;
    std::uint64_t hash() const noexcept { return bucket_->hashes[lane_]; }
    SetId set() const noexcept { return bucket_->sets[lane_]; }
    void set(SetId id) const noexcept { bucket_->sets[lane_] = id; }

   private:
    friend class HolderTable;
    Bucket* bucket_ = nullptr;
    std::size_t lane_ = 0;
  };

  // Prefetches the line of a hash and returns it; null in an empty table. Valid until `moves` changes.
  const Bucket* warm(std::uint64_t hash) const noexcept {
    const Place where = place(hash);
    const Bucket* const bucket = shards_[where.shard].buckets.data() + where.at;
    __builtin_prefetch(bucket);
    return bucket;
  }
  Bucket* warm(std::uint64_t hash) noexcept { return const_cast<Bucket*>(std::as_const(*this).warm(hash)); }
  std::uint64_t moves() const noexcept { return moves_; }
  // Set of a hash; 0: absent. `warmed` came from `warm`, and nothing has changed since.
  SetId find(std::uint64_t hash, const Bucket* warmed) const noexcept {
    if (warmed == nullptr) return 0;
    const std::size_t lane = lane_of(*warmed, hash);
    if (lane < kLanes) return warmed->sets[lane];
    if (warmed->guests_elsewhere == 0) return 0;
    const Entry entry = find(hash);
    return entry ? entry.set() : 0;
  }

  // False when absent. With a `warmed` line mostly no other is read.
  Entry find(std::uint64_t hash) const noexcept;
  Entry find(std::uint64_t hash, Bucket* warmed) const noexcept {
    if (warmed == nullptr) return {};
    if (const std::size_t lane = lane_of(*warmed, hash); lane < kLanes) return {warmed, lane};
    return warmed->guests_elsewhere == 0 ? Entry() : find(hash);
  }
  // Entry of a hash; the set of a new one is 0, and the caller assigns it.
  Entry find_or_make(std::uint64_t hash);
  Entry find_or_make(std::uint64_t hash, Bucket* warmed) {
    if (warmed == nullptr) return find_or_make(hash);
    if (const std::size_t lane = lane_of(*warmed, hash); lane < kLanes) return {warmed, lane};
    Shard& shard = shards_[place(hash).shard];
    const std::size_t lane = free_lane(*warmed);
    if (warmed->guests_elsewhere != 0 || lane == kLanes || full(shard)) return find_or_make(hash);
    ++size_;
    ++shard.used;
    warmed->hashes[lane] = hash;
    return {warmed, lane};
  }
  void erase(Entry entry) noexcept {
    UNDERSTUDY_ASSERT(entry.set() != 0 && size_ > 0, "erases a block that the table does not have");
    const Place home = place(entry.hash());
    Shard& shard = shards_[home.shard];
    if (&shard.buckets[home.at] != entry.bucket_) remove_guest(entry, home);
    entry.set(0);
    UNDERSTUDY_ASSERT(shard.used > 0, "a shard has lost count of its blocks");
    --shard.used;
    --size_;
    ++erased_;
  }
  // After erasures: releases memory far beyond need.
  void shrink();

  // Visits every entry, which `visit` may change; false erases it.
  template <typename Visit>
  void sweep(Visit visit) {
    each_lane([&](const Entry& entry) {
      if (!visit(entry)) erase(entry);
    });
  }
  template <typename Visit>
  void each(Visit visit) const {
    each_lane(visit);
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept;
  // Throws InvariantViolated when a bucket has miscounted its guests. O(blocks).
  void check() const;

 private:
  static constexpr unsigned kShardBits = 4;
  static constexpr std::size_t kFewest = 16;
  static constexpr std::size_t kLarge = std::size_t{1} << 13;
  static constexpr std::size_t kLoad2 = 7;        // twice the entries per bucket at which a shard grows
  static constexpr std::size_t kCheckAfter = 64;  // erasures
  struct Shard {
    PageArray<Bucket> buckets;
    std::size_t used = 0;
  };
  // Where the search for a hash begins.
  struct Place {
    std::uint32_t shard;
    std::uint32_t at;
  };

  Place place(std::uint64_t hash) const noexcept {
    const std::uint64_t mixed = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u;
    const auto shard = static_cast<std::uint32_t>(mixed >> (64 - kShardBits));
    const std::uint64_t remaining = (mixed << kShardBits) >> 32;
    return {shard, static_cast<std::uint32_t>((remaining * shards_[shard].buckets.size()) >> 32)};
  }
  // Lane of a hash; kLanes: none. Compares all at once, without branches.
  static std::size_t lane_of(const Bucket& bucket, std::uint64_t hash) noexcept {
    std::uint32_t alike = 1u << kLanes;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      alike |= static_cast<std::uint32_t>(bucket.hashes[lane] == hash) << lane;
    }
    auto lane = static_cast<std::size_t>(std::countr_zero(alike));
    while (lane < kLanes && bucket.sets[lane] == 0) {  // its entry was erased
      alike &= alike - 1;
      lane = static_cast<std::size_t>(std::countr_zero(alike));
    }
    return lane;
  }
  static std::size_t free_lane(const Bucket& bucket) noexcept {
    std::uint32_t free = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      free |= static_cast<std::uint32_t>(bucket.sets[lane] == 0) << lane;
    }
    return free == 0 ? kLanes : static_cast<std::size_t>(std::countr_zero(free));
  }
  static bool full(const Shard& shard) noexcept { return 2 * (shard.used + 1) > kLoad2 * shard.buckets.size(); }
  static std::size_t next(const Shard& shard, std::size_t at) noexcept {
    return at + 1 == shard.buckets.size() ? 0 : at + 1;
  }
  template <typename Visit>
  void each_lane(Visit visit) const {
    for (const Shard& shard : shards_) {
      for (std::size_t at = 0; at < shard.buckets.size(); ++at) {
        auto* const bucket = const_cast<Bucket*>(&shard.buckets[at]);
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          if (bucket->sets[lane] != 0) visit(Entry(bucket, lane));
        }
      }
    }
  }
  void remove_guest(Entry entry, Place home) noexcept;  // from the counts of the buckets that its search passes
  static Entry put(Shard& shard, std::size_t home, std::uint64_t hash) noexcept;
  void resize(Shard& shard, std::size_t buckets);

  std::array<Shard, std::size_t{1} << kShardBits> shards_;
  std::size_t size_ = 0;
  std::uint64_t moves_ = 0;  // how often entries were moved
  std::size_t erased_ = 0;   // erasures since the last shrink
};

}  // namespace understudy
