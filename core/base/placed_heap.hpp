// A heap of numbered entries that know their place, so that one can be moved or taken out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace understudy {

// An entry has an `id`, a small number of its own: there is one entry of an id at most. The first by `Before` is on
// top; no two are equal.
template <class Entry, class Before = std::less<Entry>>
class PlacedHeap {
 public:
  bool empty() const noexcept { return heap_.empty(); }
  std::size_t size() const noexcept { return heap_.size(); }
  const Entry& top() const noexcept { return heap_.front(); }
  std::span<const Entry> entries() const noexcept { return heap_; }  // in no order
  const Entry* find(std::uint32_t id) const noexcept {
    return id < place_.size() && place_[id] != kNowhere ? &heap_[place_[id]] : nullptr;
  }

  // In place of what was there of its id.
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
  // Nothing, if it is not there.
  void erase(std::uint32_t id) {
    if (id >= place_.size() || place_[id] == kNowhere) return;
    const std::size_t at = place_[id];
    place_[id] = kNowhere;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (at < heap_.size()) sink(at, last);
  }
  // All of them change alike: their order stays.
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
  // `entry` belongs at `at` or above it.
  void rise(std::size_t at, const Entry& entry) {
    for (; at > 0 && Before{}(entry, heap_[(at - 1) / 2]); at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, entry);
  }
  // … or below.
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
  std::vector<std::uint32_t> place_;  // in the heap, by id
};

}  // namespace understudy
