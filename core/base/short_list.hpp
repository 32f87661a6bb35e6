// List of small values that needs no allocation while it holds eight bytes or fewer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

namespace understudy {

template <typename T>
class ShortList {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);

 public:
  ShortList() noexcept : near_{} {}
  ShortList(ShortList&& other) noexcept
      : near_{}, size_(std::exchange(other.size_, 0)), capacity_(std::exchange(other.capacity_, kNear)) {
    std::memcpy(near_, other.near_, sizeof near_);
  }
  ShortList& operator=(ShortList&& other) noexcept {
    std::swap(near_, other.near_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ShortList(const ShortList&) = delete;
  ShortList& operator=(const ShortList&) = delete;
  ~ShortList() { clear(); }

  std::uint32_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* data() noexcept { return capacity_ > kNear ? far() : near_; }
  const T* data() const noexcept { return capacity_ > kNear ? far() : near_; }
  T& operator[](std::size_t index) noexcept { return data()[index]; }
  const T& operator[](std::size_t index) const noexcept { return data()[index]; }
  const T& back() const noexcept { return data()[size_ - 1]; }
  std::span<const T> span() const noexcept { return {data(), size_}; }
  std::size_t memory_bytes() const noexcept { return capacity_ > kNear ? capacity_ * sizeof(T) : 0; }

  void append(std::span<const T> more) {
    const auto count = static_cast<std::uint32_t>(more.size());
    if (size_ + count > capacity_) grow(size_ + count);
    std::copy(more.begin(), more.end(), data() + size_);
    size_ += count;
  }
  void truncate(std::uint32_t size) noexcept { size_ = size; }
  void drop_front(std::uint32_t count) noexcept {
    std::memmove(data(), data() + count, (size_ - count) * sizeof(T));
    size_ -= count;
  }
  // The first of those that are equal to the value, of which there is one.
  void remove(const T& value) noexcept {
    T* const at = std::find(data(), data() + size_, value);
    std::memmove(at, at + 1, static_cast<std::size_t>(data() + size_ - at - 1) * sizeof(T));
    --size_;
  }
  // Also releases the memory.
  void clear() noexcept {
    if (capacity_ > kNear) std::free(far());
    size_ = 0;
    capacity_ = kNear;
  }

 private:
  static constexpr std::uint32_t kNear = 8 / sizeof(T);

  T* far() const noexcept {
    T* out;
    std::memcpy(&out, near_, sizeof out);
    return out;
  }
  void grow(std::uint32_t least) {
    // The first allocation is exact: a list that is filled once never grows.
    const std::uint32_t capacity = capacity_ > kNear ? std::max(least, capacity_ + capacity_ / 2) : std::max(least, 4u);
    T* const fresh = static_cast<T*>(capacity_ > kNear ? std::realloc(far(), capacity * sizeof(T))
                                                       : std::malloc(capacity * sizeof(T)));
    if (fresh == nullptr) throw std::bad_alloc();
    if (capacity_ <= kNear) std::memcpy(fresh, near_, size_ * sizeof(T));
    std::memcpy(near_, &fresh, sizeof fresh);
    capacity_ = capacity;
  }

  alignas(8) T near_[kNear];  // the values, or the address of more of them
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = kNear;
};

}  // namespace understudy
