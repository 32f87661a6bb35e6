// Reuses the memory mappings of destroyed arrays.
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

// During its lifetime, arrays of this thread reuse mappings of the same length that earlier arrays released: the next
// worker, or the next run of the process, needs no new pages, which the system would have to clear. Its destructor
// leaves the mappings to the next instance on any thread; those that two runs in succession did not use are unmapped.
class KeptMappings {
 public:
  struct Mapping {
    void* base = nullptr;
    std::size_t length = 0;   // bytes
    std::size_t written = 0;  // leading bytes of an array of this length that may not be zero
    unsigned unused = 0;      // consecutive runs that did not use it
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
    swap(kept_, left().heap);  // unmaps what another thread left
  }

  // Returns a mapping of this length; base is null when there is none.
  static Mapping take(std::size_t length) noexcept {
    if (current_ == nullptr) return {};
    const Mapping kept = current_->kept_.take(length);
    return kept.base != nullptr ? kept : current_->found_.take(length);
  }
  // Takes ownership; false: the caller still owns it.
  static bool keep(const Mapping& mapping) noexcept { return current_ != nullptr && current_->kept_.add(mapping); }
  // Unmaps everything that is kept, by this thread or for the next instance. False: there was nothing.
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
  // Limits in bytes: length of one mapping; total written; total address space.
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
    // Takes over the mappings of `other` that recent runs used.
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
  // Never destroyed: a thread may outlive static objects.
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
