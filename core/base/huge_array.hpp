// Zero-initialised array of fixed size that uses memory only where it is written; long ones in huge pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "base/kept_mappings.hpp"

namespace understudy {

// Unwritten elements cost address space only, so an array can have its owner's maximum size and never moves. Long
// arrays are mapped directly (MAP_NORESERVE): an allocator would write zeros over reused memory.
template <typename T>
class HugeArray {
  static_assert(std::is_trivially_destructible_v<T> && std::is_trivially_copyable_v<T>);

 public:
  // Write pattern: decides whether the mapping is kept for a later array.
  enum class Writes : std::uint8_t {
    Sparse,     // scattered: clearing it would cost more than new memory
    Dense,      // the whole array
    Populated,  // the ranges that `populate` was called for
  };

  explicit HugeArray(std::size_t size, Writes writes = Writes::Sparse) : writes_(writes), size_(size) {
    const std::size_t bytes = size * sizeof(T);
    if (bytes < kShort || !map(bytes)) allocate(bytes);
  }
  HugeArray(HugeArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        base_(std::exchange(other.base_, nullptr)),
        mapped_(std::exchange(other.mapped_, 0)),
        written_(std::exchange(other.written_, 0)),
        had_(std::exchange(other.had_, 0)),
        populated_(std::exchange(other.populated_, 0)),
        writes_(other.writes_),
        size_(std::exchange(other.size_, 0)) {}
  HugeArray& operator=(HugeArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(written_, other.written_);
    std::swap(had_, other.had_);
    std::swap(populated_, other.populated_);
    std::swap(writes_, other.writes_);
    std::swap(size_, other.size_);
    return *this;
  }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  ~HugeArray() {
#ifdef __linux__
    if (mapped_ > 0) {
      // Clearing a mostly empty mapping costs more than new memory does.
      const bool worth = writes_ != Writes::Sparse && written_ >= kShort && 2 * populated_ >= written_;
      if (!worth || !KeptMappings::keep({base_, mapped_, written_})) (void)munmap(base_, mapped_);
      return;
    }
#endif
    std::free(base_);
  }

  // Advises huge pages where [from, to) fills them whole (the array's last one: at least half), because random access
  // is bound by address translation.
  void prefer_huge_pages([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    const std::size_t first = (from * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    const std::size_t last = last_huge(to, to == size_ ? kHugePage / 2 : 0);
    if (first < last) (void)madvise(byte(first), last - first, MADV_HUGEPAGE);
#endif
  }

  // Moves the memory of [from, to), and of elements in the same huge pages, to huge pages now if the system can.
  void move_to_huge_pages([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack, and older systems refuse
    const std::size_t first = from * sizeof(T) / kHugePage * kHugePage;
    const std::size_t last = last_huge(to, to == size_ ? kHugePage / 2 : 0);
    if (first < last) (void)madvise(byte(first), last - first, kCollapse);
#endif
  }

  // Allocates memory for [from, to) at once, before it is written: faulting page by page takes several times longer.
  void populate([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    if (mapped_ == 0 || from >= to) return;
    constexpr std::size_t kPage = 4096;
    const std::size_t first = std::max(from * sizeof(T) / kPage * kPage, (had_ + kPage - 1) / kPage * kPage);
    const std::size_t last = (to * sizeof(T) + kPage - 1) / kPage * kPage;
    written_ = std::max(written_, to * sizeof(T));
    populated_ += (to - from) * sizeof(T);
#ifdef MADV_POPULATE_WRITE
    if (first < last) (void)madvise(byte(first), last - first, MADV_POPULATE_WRITE);  // best effort
#endif
#endif
  }

  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  T* get() noexcept { return data_; }
  const T* get() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kShort = std::size_t{1} << 16;  // bytes; shorter arrays are not mapped

  char* byte(std::size_t at) noexcept { return reinterpret_cast<char*>(data_) + at; }

  // End, in bytes, of the huge pages that [0, to) fills but for `lacks` bytes; 0 when the array has no whole ones.
  std::size_t last_huge(std::size_t to, std::size_t lacks) const noexcept {
    return mapped_ < kHugePage ? 0 : (to * sizeof(T) + lacks) / kHugePage * kHugePage;
  }

  static T* aligned(void* base, std::size_t alignment) noexcept {
    const auto at = reinterpret_cast<std::uintptr_t>(base);
    return reinterpret_cast<T*>((at + alignment - 1) / alignment * alignment);
  }

  // False: the system refused another mapping.
  bool map([[maybe_unused]] std::size_t bytes) noexcept {
#ifdef __linux__
    const bool whole = bytes >= kHugePage / 2;  // whole huge pages, aligned
    const std::size_t length = whole ? (bytes + 2 * kHugePage - 1) / kHugePage * kHugePage : bytes;
    const auto fresh = [length] {
      return mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    };
    const KeptMappings::Mapping kept = writes_ == Writes::Sparse ? KeptMappings::Mapping{} : KeptMappings::take(length);
    base_ = kept.base != nullptr ? kept.base : fresh();
    if (base_ == MAP_FAILED && KeptMappings::give_back()) base_ = fresh();
    if (base_ == MAP_FAILED) return false;
    mapped_ = length;
    data_ = whole ? aligned(base_, kHugePage) : static_cast<T*>(base_);
    had_ = kept.written;
    populated_ = writes_ == Writes::Dense ? bytes : 0;
    written_ = std::max(had_, populated_);
    if (had_ > 0) std::memset(static_cast<void*>(data_), 0, had_);
    return true;
#else
    return false;
#endif
  }

  void allocate(std::size_t bytes) {
    base_ = std::calloc(bytes + kLine, 1);
    if (base_ == nullptr) throw std::bad_alloc();
    data_ = aligned(base_, kLine);
  }

  T* data_ = nullptr;
  void* base_ = nullptr;
  std::size_t mapped_ = 0;   // bytes; 0: allocated, not mapped
  std::size_t written_ = 0;  // leading bytes that this array or a previous owner may have written; the others are zero
  std::size_t had_ = 0;      // leading bytes that a previous owner may have written
  std::size_t populated_ = 0;  // bytes populated by this array
  Writes writes_;
  std::size_t size_;
};

}  // namespace understudy
