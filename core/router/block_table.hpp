// Blocks by sequence hash, with who holds each: the flat table under a prefix index.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "router/holder_sets.hpp"
#include "router/page_array.hpp"

namespace understudy {

// Open addressing in shards that grow and shrink by themselves, so that no call ever moves the whole table and old and
// new never stand side by side in full. Deletion moves followers up: no tombstones, and a search ends at the first
// free entry.
class BlockTable {
 public:
  struct Entry {
    std::uint64_t hash;
    SetId set;            // 0: free
    std::uint32_t extra;  // copies beyond the first of each holder, over all holders
  };
  static_assert(sizeof(Entry) == 16);

  // Where the search for a hash begins.
  struct Place {
    std::uint32_t shard;
    std::uint32_t at;
  };
  Place place(std::uint64_t hash) const noexcept {
    const std::uint64_t mixed = (hash ^ (hash >> 32)) * 0x9E3779B97F4A7C15u;
    const auto shard = static_cast<std::uint32_t>(mixed >> (64 - kShardBits));
    const std::uint64_t rest = (mixed << kShardBits) >> 32;
    return {shard, static_cast<std::uint32_t>((rest * shards_[shard].entries.size()) >> 32)};
  }
  // Asks for a hash's line, some blocks ahead of its use, and says where it is.
  const Entry* warm(std::uint64_t hash) const noexcept {
    const Place where = place(hash);
    const Entry* const entry = shards_[where.shard].entries.data() + where.at;
    __builtin_prefetch(entry);
    return entry;
  }

  const Entry* find(std::uint64_t hash) const noexcept {
    const Place from = place(hash);
    const Shard& shard = shards_[from.shard];
    if (shard.used == 0) return nullptr;
    for (std::size_t at = from.at;; at = at + 1 == shard.entries.size() ? 0 : at + 1) {
      const Entry& entry = shard.entries[at];
      if (entry.set == 0) return nullptr;
      if (entry.hash == hash) return &entry;
    }
  }
  // `warmed` came from this hash, and nothing has changed since.
  const Entry* find(std::uint64_t hash, const Entry* warmed) const noexcept {
    if (warmed != nullptr && warmed->hash == hash && warmed->set != 0) return warmed;
    return find(hash);
  }
  Entry* find(std::uint64_t hash) noexcept { return const_cast<Entry*>(std::as_const(*this).find(hash)); }

  // The entry of a hash; of one that is new its set is 0, and the caller gives it one. Others may move.
  Entry& find_or_make(std::uint64_t hash);
  // The entry goes, which others may take the place of.
  void erase(Entry* entry) noexcept;
  // After erasures: gives back what is far more than needed.
  void shrink();

  // Every entry, which `visit` may change; false erases it.
  template <typename Visit>
  void sweep(Visit visit) {
    for (Shard& shard : shards_) {
      for (std::size_t at = 0; at < shard.entries.size();) {
        // Another moves to the place of an erased one: at the end of the table perhaps one that was seen already.
        if (shard.entries[at].set != 0 && !visit(shard.entries[at])) {
          erase(shard, at);
        } else {
          ++at;
        }
      }
    }
  }
  template <typename Visit>
  void each(Visit visit) const {
    for (const Shard& shard : shards_) {
      for (std::size_t at = 0; at < shard.entries.size(); ++at) {
        if (shard.entries[at].set != 0) visit(shard.entries[at]);
      }
    }
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept;

 private:
  static constexpr unsigned kShardBits = 4;
  static constexpr std::size_t kFewest = 64;
  static constexpr std::size_t kLarge = std::size_t{1} << 15;
  struct Shard {
    PageArray<Entry> entries;
    std::size_t used = 0;
  };

  void erase(Shard& shard, std::size_t at) noexcept;
  void resize(Shard& shard, std::size_t capacity);

  std::array<Shard, std::size_t{1} << kShardBits> shards_;
  std::size_t size_ = 0;
};

}  // namespace understudy
