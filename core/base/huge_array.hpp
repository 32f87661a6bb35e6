// A fixed array that asks the system for huge pages: random access over many slots is bound by address translation.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace understudy {

template <typename T>
class HugeArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  // `size` value-initialised elements.
  explicit HugeArray(std::size_t size) : size_(size) {
    const std::size_t alignment = size * sizeof(T) >= kHugePage / 2 ? kHugePage : std::size_t{64};
    const std::size_t bytes = (size * sizeof(T) / alignment + 1) * alignment;  // never none
    data_.reset(static_cast<T*>(std::aligned_alloc(alignment, bytes)));
    if (!data_) throw std::bad_alloc();
#ifdef __linux__
    // Advice only: where it is refused, the array works as well, slower.
    if (alignment == kHugePage) (void)madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
    std::uninitialized_value_construct_n(data_.get(), size);
  }

  // `size` elements of zero bytes, for an array of which little may be used: what is never written costs no memory.
  struct Zeroed {};
  HugeArray(std::size_t size, Zeroed) : size_(size) {
    static_assert(std::is_trivially_copyable_v<T>);
    data_.reset(static_cast<T*>(std::calloc(size + 1, sizeof(T))));
    if (!data_) throw std::bad_alloc();
  }

  T& operator[](std::size_t i) noexcept { return data_.get()[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_.get()[i]; }
  T* get() noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  struct Free {
    void operator()(T* p) const noexcept { std::free(p); }
  };

  std::unique_ptr<T, Free> data_;
  std::size_t size_;
};

}  // namespace understudy
