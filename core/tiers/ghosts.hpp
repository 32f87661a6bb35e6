// Keys of chunks that were evicted from the host, in two lists, oldest first: what ARC learns from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/huge_allocator.hpp"
#include "tokens/lineage_hash.hpp"

namespace understudy {

// A key is in one of the lists, or in none. One table for both, probed from a key's home on and never left with gaps,
// so that absent keys, which most are, cost one line of memory; `warm` asks for it ahead of its use.
class Ghosts {
 public:
  enum List : std::uint8_t { kOnce, kOften };
  using Node = std::uint32_t;
  static constexpr Node kNobody = 0xFFFFFFFFu;

  Ghosts() : table_(kFewest) {}

  std::size_t size(List list) const noexcept { return ends_[list].size; }
  List list_of(Node node) const noexcept { return nodes_[node].list; }
  void warm(const LineageHash& key) const noexcept { __builtin_prefetch(&table_[home(tag(key))]); }

  Node find(const LineageHash& key) const noexcept;
  void add(List list, const LineageHash& key);  // in none of them
  void remove(Node node) noexcept;
  void refresh(Node node) noexcept;  // it is the youngest of its list
  void trim(List list, std::size_t size) noexcept;

 private:
  static constexpr std::size_t kFewest = 1024;  // entries of a table; a power of two

  struct Ghost {
    LineageHash key;
    Node prev;
    Node next;
    List list;
  };
  struct Entry {
    std::uint32_t tag = 0;
    Node node = kNobody;
  };
  using Table = std::vector<Entry, HugeAllocator<Entry>>;
  struct Ends {
    Node front = kNobody;
    Node back = kNobody;
    std::size_t size = 0;
  };

  static std::uint32_t tag(const LineageHash& key) noexcept {
    return static_cast<std::uint32_t>((key.lo * 0x9E3779B97F4A7C15u + key.hi * 0xD1B54A32D192ED03u) >> 32);
  }
  std::size_t home(std::uint32_t tag) const noexcept { return tag & (table_.size() - 1); }
  std::size_t next(std::size_t at) const noexcept { return (at + 1) & (table_.size() - 1); }
  void enter(std::uint32_t tag, Node node) noexcept;
  void leave(Node node) noexcept;
  void grow();
  void link(Node node) noexcept;
  void unlink(Node node) noexcept;

  std::vector<Ghost, HugeAllocator<Ghost>> nodes_;
  Node free_ = kNobody;  // the first that is in no list; they are linked by `next`
  Table table_;          // never more than three quarters full
  std::array<Ends, 2> ends_;
};

}  // namespace understudy
