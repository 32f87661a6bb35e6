// A fixed array of zeros that takes memory as it is written, in huge pages where it is long.
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

// Elements start as zero bytes, and what is never written costs address space alone: an array may be as long as its
// owner can ever need, and nobody has to move it. All but short ones come from the system itself, without a promise of
// memory: an allocator would write zeros over what it hands out again.
template <typename T>
class HugeArray {
  static_assert(std::is_trivially_destructible_v<T> && std::is_trivially_copyable_v<T>);

 public:
  // How it will be written to, which decides whether its memory is worth keeping for the next one.
  enum class Writes : std::uint8_t {
    Sparse,     // here and there: to clear it would cost more than new memory
    Dense,      // all of it
    Populated,  // what `populate` was called for
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
      // What is mostly empty up to its last write costs more to clear than new memory does.
      const bool worth = writes_ != Writes::Sparse && written_ >= kShort && 2 * populated_ >= written_;
      if (!worth || !KeptMappings::keep({base_, mapped_, written_})) (void)munmap(base_, mapped_);
      return;
    }
#endif
    std::free(base_);
  }

  // Random access over many elements is bound by address translation. Advice for those of [from, to) that fill whole
  // huge pages, the array's last one by half at least: there, the first that is written brings memory for its
  // neighbours.
  void prefer_huge_pages([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    const std::size_t first = (from * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    const std::size_t last = last_huge(to, to == size_ ? kHugePage / 2 : 0);
    if (first < last) (void)madvise(byte(first), last - first, MADV_HUGEPAGE);
#endif
  }

  // The same for memory that they have already, and for what shares a huge page with it: now, where the system can.
  void move_to_huge_pages([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack, and older systems refuse
    const std::size_t first = from * sizeof(T) / kHugePage * kHugePage;
    const std::size_t last = last_huge(to, to == size_ ? kHugePage / 2 : 0);
    if (first < last) (void)madvise(byte(first), last - first, kCollapse);
#endif
  }

  // Memory for [from, to) now: all of it is about to be written, and page by page it takes several times as long.
  void populate([[maybe_unused]] std::size_t from, [[maybe_unused]] std::size_t to) noexcept {
#ifdef __linux__
    if (mapped_ == 0 || from >= to) return;
    constexpr std::size_t kPage = 4096;
    const std::size_t first = std::max(from * sizeof(T) / kPage * kPage, (had_ + kPage - 1) / kPage * kPage);
    const std::size_t last = (to * sizeof(T) + kPage - 1) / kPage * kPage;
    written_ = std::max(written_, to * sizeof(T));
    populated_ += (to - from) * sizeof(T);
#ifdef MADV_POPULATE_WRITE
    if (first < last) (void)madvise(byte(first), last - first, MADV_POPULATE_WRITE);  // where it can
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
  static constexpr std::size_t kShort = std::size_t{1} << 16;  // bytes: not worth a mapping

  char* byte(std::size_t at) noexcept { return reinterpret_cast<char*>(data_) + at; }

  // In bytes: the end of the huge pages that [.., to) fills but for `lacks`; 0 where the array has no whole ones.
  std::size_t last_huge(std::size_t to, std::size_t lacks) const noexcept {
    return mapped_ < kHugePage ? 0 : (to * sizeof(T) + lacks) / kHugePage * kHugePage;
  }

  static T* aligned(void* base, std::size_t alignment) noexcept {
    const auto at = reinterpret_cast<std::uintptr_t>(base);
    return reinterpret_cast<T*>((at + alignment - 1) / alignment * alignment);
  }

  // False: the system has no more mappings to give.
  bool map([[maybe_unused]] std::size_t bytes) noexcept {
#ifdef __linux__
    const bool whole = bytes >= kHugePage / 2;  // in whole huge pages, at an address that is one's
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
  std::size_t mapped_ = 0;     // bytes; 0: it is the allocator's
  std::size_t written_ = 0;    // the first bytes, by this array or one before; the others are zero
  std::size_t had_ = 0;        // the same, by one before
  std::size_t populated_ = 0;  // bytes, of this one
  Writes writes_;
  std::size_t size_;
};

}  // namespace understudy
