// When each lane and each group of links has its next end: one entry each, which moves when that does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace understudy {

// A heap whose entries know their place. Of ends at one time lanes come before groups, and then by number.
class WakeQueue {
 public:
  __extension__ using Tick = unsigned __int128;

  struct Wake {
    Tick tick = 0;
    bool of_group = false;
    std::uint32_t id = 0;
    bool operator<(const Wake& other) const noexcept {
      if (tick != other.tick) return tick < other.tick;
      return std::tie(of_group, id) < std::tie(other.of_group, other.id);
    }
  };

  bool empty() const noexcept { return heap_.empty(); }
  const Wake& top() const noexcept { return heap_.front(); }
  std::optional<Tick> at(bool of_group, std::uint32_t id) const {
    const std::size_t key = key_of(of_group, id);
    if (key >= place_.size() || place_[key] == kNowhere) return std::nullopt;
    return heap_[place_[key]].tick;
  }

  // It has its next end then, or none.
  void set(bool of_group, std::uint32_t id, const std::optional<Tick>& tick) {
    const std::size_t key = key_of(of_group, id);
    if (key >= place_.size()) place_.resize(key + 1, kNowhere);
    const std::size_t at = place_[key];
    if (at == kNowhere) {
      if (!tick) return;
      heap_.emplace_back();
      rise(heap_.size() - 1, {*tick, of_group, id});
    } else if (tick) {
      sink(at, {*tick, of_group, id});
    } else {
      place_[key] = kNowhere;
      const Wake last = heap_.back();
      heap_.pop_back();
      if (at < heap_.size()) sink(at, last);
    }
  }

 private:
  static constexpr std::uint32_t kNowhere = 0xFFFFFFFFu;

  static std::size_t key_of(bool of_group, std::uint32_t id) noexcept {
    return 2 * std::size_t{id} + (of_group ? 1 : 0);
  }
  void put(std::size_t at, const Wake& wake) {
    heap_[at] = wake;
    place_[key_of(wake.of_group, wake.id)] = static_cast<std::uint32_t>(at);
  }
  // `wake` belongs at `at` or above it.
  void rise(std::size_t at, const Wake& wake) {
    for (; at > 0 && wake < heap_[(at - 1) / 2]; at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, wake);
  }
  // … or below.
  void sink(std::size_t at, const Wake& wake) {
    for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < wake)) break;
      put(at, heap_[child]);
      at = child;
    }
    rise(at, wake);
  }

  std::vector<Wake> heap_;
  std::vector<std::uint32_t> place_;  // in the heap, by key
};

}  // namespace understudy
