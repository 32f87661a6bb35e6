// Memory of arrays that are gone, for those that come.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace understudy {

// While one lives, its thread keeps a few of the mappings that arrays give up, and arrays of the same length get them
// again: a worker that is played behind another needs no new memory from the system, which would have to clear it page
// by page.
class KeptMappings {
 public:
  KeptMappings() noexcept : outer_(std::exchange(current_, this)) {}
  KeptMappings(const KeptMappings&) = delete;
  KeptMappings& operator=(const KeptMappings&) = delete;
  ~KeptMappings() {
    current_ = outer_;
#ifdef __linux__
    for (const Mapping& mapping : kept_) {
      if (mapping.base != nullptr) (void)munmap(mapping.base, mapping.length);
    }
#endif
  }

  // One of this length, with what was written to it; null: there is none.
  static void* take(std::size_t length) noexcept {
    if (current_ == nullptr) return nullptr;
    for (Mapping& mapping : current_->kept_) {
      if (mapping.base != nullptr && mapping.length == length) return std::exchange(mapping.base, nullptr);
    }
    return nullptr;
  }
  // False: the caller keeps it.
  static bool keep(void* base, std::size_t length) noexcept {
    if (current_ == nullptr || length > kLongest) return false;
    for (Mapping& mapping : current_->kept_) {
      if (mapping.base != nullptr) continue;
      mapping = {base, length};
      return true;
    }
    return false;
  }

 private:
  // All are written as a whole when they are used again, however little of them was: no more than some megabytes.
  static constexpr std::size_t kLongest = std::size_t{6} << 20;
  static constexpr std::size_t kMost = 12;

  struct Mapping {
    void* base = nullptr;
    std::size_t length = 0;
  };

  static inline thread_local KeptMappings* current_ = nullptr;

  KeptMappings* outer_;
  std::array<Mapping, kMost> kept_{};
};

}  // namespace understudy
