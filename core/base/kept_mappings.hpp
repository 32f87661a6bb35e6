// Memory of arrays that are gone, for those that come.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace understudy {

// While one lives, its thread keeps the mappings that arrays give up, and arrays of the same length get them again: a
// worker that is played behind another, or in the next run of the process, needs no new memory from the system, which
// would have to clear it page by page. At its end, what arrays have given up meanwhile is left for the next one,
// whoever's thread that is in. So is what it found and nobody has used, but not for ever: runs of two kinds may take
// turns, and what neither of the last two has used goes back to the system.
class KeptMappings {
 public:
  struct Mapping {
    void* base = nullptr;
    std::size_t length = 0;   // bytes
    std::size_t written = 0;  // so many may be anything, from where an array of this length begins; the others are zero
    unsigned unused = 0;      // so many runs, the last ones
  };

  KeptMappings() noexcept : outer_(std::exchange(current_, this)) {
    const std::lock_guard lock(left().mutex);
    swap(found_, left().heap);
  }
  KeptMappings(const KeptMappings&) = delete;
  KeptMappings& operator=(const KeptMappings&) = delete;
  ~KeptMappings() {
    current_ = outer_;
    kept_.inherit(found_);
    const std::lock_guard lock(left().mutex);
    swap(kept_, left().heap);  // that of another thread goes
  }

  // One of this length; its base is null when there is none.
  static Mapping take(std::size_t length) noexcept {
    if (current_ == nullptr) return {};
    const Mapping kept = current_->kept_.take(length);
    return kept.base != nullptr ? kept : current_->found_.take(length);
  }
  // False: the caller keeps it.
  static bool keep(const Mapping& mapping) noexcept { return current_ != nullptr && current_->kept_.add(mapping); }
  // All that is kept, by this thread or for the next one, goes back to the system. False: there was nothing.
  static bool give_back() noexcept {
    std::array<Heap, 3> gone;
    if (current_ != nullptr) {
      swap(gone[0], current_->kept_);
      swap(gone[1], current_->found_);
    }
    const std::lock_guard lock(left().mutex);
    swap(gone[2], left().heap);
    return std::ranges::any_of(gone, [](const Heap& heap) { return !heap.empty(); });
  }

 private:
  // Bytes; of all, those that were written, and addresses.
  static constexpr std::size_t kLongest = std::size_t{32} << 20;
  static constexpr std::size_t kMostWritten = std::size_t{256} << 20;
  static constexpr std::size_t kMostAddresses = std::size_t{1} << 30;
  static constexpr unsigned kMostUnused = 2;  // runs

  class Heap {
   public:
    Heap() = default;
    Heap(const Heap&) = delete;
    Heap& operator=(const Heap&) = delete;
    ~Heap() {
#ifdef __linux__
      for (const auto& [length, mappings] : by_length_) {
        for (const Mapping& mapping : mappings) (void)munmap(mapping.base, length);
      }
#endif
    }
    friend void swap(Heap& a, Heap& b) noexcept {
      std::swap(a.by_length_, b.by_length_);
      std::swap(a.written_, b.written_);
      std::swap(a.addresses_, b.addresses_);
    }

    bool empty() const noexcept { return addresses_ == 0; }
    Mapping take(std::size_t length) noexcept {
      const auto found = by_length_.find(length);
      if (found == by_length_.end() || found->second.empty()) return {};
      const Mapping mapping = found->second.back();
      found->second.pop_back();
      count_out(mapping);
      return mapping;
    }
    bool add(const Mapping& mapping) noexcept {
      if (mapping.length > kLongest || written_ + mapping.written > kMostWritten ||
          addresses_ + mapping.length > kMostAddresses) {
        return false;
      }
      try {
        by_length_[mapping.length].push_back(mapping);
      } catch (const std::bad_alloc&) {
        return false;
      }
      written_ += mapping.written;
      addresses_ += mapping.length;
      return true;
    }
    // What another has left over, if it was used not long ago.
    void inherit(Heap& other) noexcept {
      for (auto& [length, mappings] : other.by_length_) {
        std::erase_if(mappings, [&](Mapping mapping) {
          const bool taken = ++mapping.unused < kMostUnused && add(mapping);
          if (taken) other.count_out(mapping);
          return taken;
        });
      }
    }

   private:
    void count_out(const Mapping& mapping) noexcept {
      written_ -= mapping.written;
      addresses_ -= mapping.length;
    }

    std::map<std::size_t, std::vector<Mapping>> by_length_;
    std::size_t written_ = 0;
    std::size_t addresses_ = 0;
  };

  struct Left {
    std::mutex mutex;
    Heap heap;
  };
  // Never ends: a thread may outlast the process's other objects.
  static Left& left() noexcept {
    alignas(Left) static std::array<std::byte, sizeof(Left)> room;
    static Left& it = *::new (room.data()) Left;
    return it;
  }

  static inline thread_local KeptMappings* current_ = nullptr;

  KeptMappings* outer_;
  Heap found_;
  Heap kept_;
};

}  // namespace understudy
