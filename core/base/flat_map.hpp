// Map from 64-bit hashes to small values in one array: a lookup reads one cache line, and nothing is allocated per
// entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace understudy {

// Keys are hashes already, and choose their place by their low bits. `Value{}` is small and cheap to move. A reference
// is valid until the next insertion or erasure.
template <typename Value>
class FlatMap {
 public:
  FlatMap() : entries_(kSmallest) {}

  std::size_t size() const noexcept { return size_; }
  bool contains(std::uint64_t key) const noexcept { return entries_[place_of(key)].used; }
  // Read the place of a key ahead of its use: in a loop of its own, so that many reads overlap.
  void touch(std::uint64_t key) const noexcept {
    static_cast<void>(*static_cast<const volatile bool*>(&entries_[home_of(key)].used));
  }
  // The key's value; null: none.
  Value* find(std::uint64_t key) noexcept {
    Entry& entry = entries_[place_of(key)];
    return entry.used ? &entry.value : nullptr;
  }
  const Value* find(std::uint64_t key) const noexcept {
    const Entry& entry = entries_[place_of(key)];
    return entry.used ? &entry.value : nullptr;
  }
  // Calls `visit(key, value)` for each, in no order.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Entry& entry : entries_) {
      if (entry.used) visit(entry.key, entry.value);
    }
  }
  // The key's value, which is new and `Value{}` if the key is.
  Value& operator[](std::uint64_t key) {
    std::size_t at = place_of(key);
    if (!entries_[at].used) {
      if (2 * ++size_ > entries_.size()) {
        grow();
        at = place_of(key);
      }
      entries_[at] = {key, Value{}, true};
    }
    return entries_[at].value;
  }
  void erase(std::uint64_t key) noexcept {
    std::size_t hole = place_of(key);
    if (!entries_[hole].used) return;
    --size_;
    // Entries that a search would no longer reach move into the hole.
    for (std::size_t at = next(hole); entries_[at].used; at = next(at)) {
      const std::size_t home = home_of(entries_[at].key);
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;
      entries_[hole] = std::move(entries_[at]);
      hole = at;
    }
    entries_[hole] = Entry{};
  }

 private:
  static constexpr std::size_t kSmallest = 16;

  struct Entry {
    std::uint64_t key = 0;
    Value value{};
    bool used = false;
  };

  std::size_t mask() const noexcept { return entries_.size() - 1; }
  std::size_t home_of(std::uint64_t key) const noexcept { return key & mask(); }
  std::size_t next(std::size_t at) const noexcept { return (at + 1) & mask(); }
  // Where the key is, or would be.
  std::size_t place_of(std::uint64_t key) const noexcept {
    std::size_t at = home_of(key);
    while (entries_[at].used && entries_[at].key != key) at = next(at);
    return at;
  }
  void grow() {
    std::vector<Entry> old(2 * entries_.size());
    std::swap(old, entries_);
    for (Entry& entry : old) {
      if (entry.used) entries_[place_of(entry.key)] = std::move(entry);
    }
  }

  std::vector<Entry> entries_;  // a power of two, at most half of them used
  std::size_t size_ = 0;
};

}  // namespace understudy
