// Binary heap of numbered entries that supports updating and removing any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace understudy {

// Each entry has an `id`, a small number; at most one entry per id. The first by `Before` is on top; no two are equal.
template <class Entry, class Before = std::less<Entry>>
class PlacedHeap {
 public:
  bool empty() const noexcept { return heap_.empty(); }
  std::size_t size() const noexcept { return heap_.size(); }
  const Entry& top() const noexcept { return heap_.front(); }
  std::span<const Entry> entries() const noexcept { return heap_; }  // unordered
  const Entry* find(std::uint32_t id) const noexcept {
    return id < place_.size() && place_[id] != kNowhere ? &heap_[place_[id]] : nullptr;
  }

  // Inserts the entry or replaces the one with its id.
  void set(const Entry& entry) {
    if (entry.id >= place_.size()) place_.resize(std::size_t{entry.id} + 1, kNowhere);
    const std::size_t at = place_[entry.id];
    if (at == kNowhere) {
      heap_.emplace_back();
      rise(heap_.size() - 1, entry);
    } else {
      sink(at, entry);
    }
  }
  // Does nothing when the id is absent.
  void erase(std::uint32_t id) {
    if (id >= place_.size() || place_[id] == kNowhere) return;
    const std::size_t at = place_[id];
    place_[id] = kNowhere;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (at < heap_.size()) sink(at, last);
  }
  // Applies a change that keeps the order of the entries.
  template <class Change>
  void change_all(Change change) {
    for (Entry& entry : heap_) change(entry);
  }

 private:
  static constexpr std::uint32_t kNowhere = 0xFFFFFFFFu;

  void put(std::size_t at, const Entry& entry) {
    heap_[at] = entry;
    place_[entry.id] = static_cast<std::uint32_t>(at);
  }
  // Places `entry` at `at` or above it.
  void rise(std::size_t at, const Entry& entry) {
    for (; at > 0 && Before{}(entry, heap_[(at - 1) / 2]); at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, entry);
  }
  // Places `entry` at `at`, above or below it.
  void sink(std::size_t at, const Entry& entry) {
    for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && Before{}(heap_[child + 1], heap_[child])) ++child;
      if (!Before{}(heap_[child], entry)) break;
      put(at, heap_[child]);
      at = child;
    }
    rise(at, entry);
  }

  std::vector<Entry> heap_;
  std::vector<std::uint32_t> place_;  // index into heap_, by id
};

}  // namespace understudy
