// Evicted-key history of the host, in two lists, oldest first: ARC adapts its target from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/huge_allocator.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

// A key is in at most one list. One table for both, with linear probing: a byte of each key's hash, so that absent keys
// (most are) cost one line of a small array, and the keys' nodes. A deleted place stays closed until the table is
// rebuilt, unless the next place is empty.
class EvictedKeys {
 public:
  enum List : std::uint8_t { kOnce, kOften };
  using Node = std::uint32_t;
  static constexpr Node kNone = 0xFFFFFFFFu;

  EvictedKeys() { make_table(kFewest); }

  std::size_t size(List list) const noexcept { return ends_[list].size; }
  List list_of(Node node) const noexcept { return nodes_[node].list; }
  // Prefetches the line of a key.
  void warm(const LineageHash& key) const noexcept { __builtin_prefetch(&marks_[home(hash(key))]); }

  Node find(const LineageHash& key) const noexcept;
  void add(List list, const LineageHash& key);  // must be in neither list
  void remove(Node node) noexcept;
  void refresh(Node node) noexcept;  // makes it the youngest of its list
  void trim(List list, std::size_t size) noexcept;

 private:
  static constexpr std::size_t kFewest = 1024;  // places of a table; a power of two
  static constexpr std::uint8_t kEmpty = 0;
  static constexpr std::uint8_t kDeleted = 1;

  struct Entry {
    LineageHash key;
    Node prev;
    Node next;
    std::uint32_t place;
    List list;
  };
  static_assert(sizeof(Entry) == 32);
  struct Ends {
    Node front = kNone;
    Node back = kNone;
    std::size_t size = 0;
  };

  static std::uint32_t hash(const LineageHash& key) noexcept {
    return static_cast<std::uint32_t>((key.lo * 0x9E3779B97F4A7C15u + key.hi * 0xD1B54A32D192ED03u) >> 32);
  }
  static std::uint8_t mark(std::uint32_t hash) noexcept { return static_cast<std::uint8_t>(0x80u | (hash >> 25)); }
  std::size_t home(std::uint32_t hash) const noexcept { return hash & (marks_.size() - 1); }
  std::size_t next(std::size_t at) const noexcept { return (at + 1) & (marks_.size() - 1); }
  void make_table(std::size_t places);
  void enter(Node node) noexcept;
  void link(Node node) noexcept;
  void unlink(Node node) noexcept;

  std::vector<Entry, HugeAllocator<Entry>> nodes_;
  Node free_ = kNone;                // first unused node; linked by `next`
  std::vector<std::uint8_t> marks_;  // by place: kEmpty, kDeleted, or a part of the key's hash
  std::vector<Node> holders_;        // by place
  std::size_t closed_ = 0;           // places that are not empty: at most three quarters
  std::array<Ends, 2> ends_;
};

}  // namespace understudy
