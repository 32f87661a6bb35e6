// Zeroed array whose memory returns to the system when freed, unlike an allocator's.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace understudy {

// Large arrays are mapped, in huge pages if available: random access is bound by address translation, and a table that
// has shrunk must not stay in the process's heap.
template <typename T>
class PageArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  PageArray() = default;
  explicit PageArray(std::size_t size) : size_(size) {
    if (size == 0) return;
#ifdef __linux__
    if (mapped()) {
      const std::size_t rounded = bytes() < kHugePage / 2 ? bytes() : (bytes() + kHugePage - 1) / kHugePage * kHugePage;
      const std::size_t extra = rounded >= kHugePage ? kHugePage : 0;  // to align with a huge page
      span_ = rounded + extra;
      base_ = mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw std::bad_alloc();
      }
      auto* const at = static_cast<std::byte*>(base_);
      const std::size_t past = extra == 0 ? 0 : reinterpret_cast<std::size_t>(at) % kHugePage;
      data_ = reinterpret_cast<T*>(at + (past == 0 ? 0 : kHugePage - past));
      // Advice only: without it the array is slower.
      if (extra != 0) (void)madvise(data_, rounded, MADV_HUGEPAGE);
      return;
    }
#endif
    data_ = static_cast<T*>(
        std::aligned_alloc(alignof(std::max_align_t) < alignof(T) ? alignof(T) : alignof(std::max_align_t), bytes()));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes());
  }
  PageArray(PageArray&& other) noexcept { swap(other); }
  PageArray& operator=(PageArray&& other) noexcept {
    PageArray taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~PageArray() {
#ifdef __linux__
    if (base_ != nullptr) {
      munmap(base_, span_);
      return;
    }
#endif
    std::free(data_);
  }

  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return size_ * sizeof(T); }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  bool mapped() const noexcept { return bytes() >= kHugePage / 32; }
  void swap(PageArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(base_, other.base_);
    std::swap(span_, other.span_);
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  void* base_ = nullptr;
  std::size_t span_ = 0;
};

}  // namespace understudy
