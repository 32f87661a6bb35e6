// Objects of one type with stable addresses, whose memory is reused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace understudy {

template <typename T>
class Slab {
 public:
  T* take() {
    if (spare_.empty()) add_chunk();
    T* const out = spare_.back();
    spare_.pop_back();
    return out;
  }
  void give_back(T* used) noexcept {
    *used = T{};  // also releases what it owns
    spare_.push_back(used);
  }
  std::size_t in_use() const noexcept { return total_ - spare_.size(); }
  std::size_t memory_bytes() const noexcept { return total_ * sizeof(T) + spare_.capacity() * sizeof(T*); }

 private:
  static constexpr std::size_t kFirst = 16;
  static constexpr std::size_t kMost = 1024;

  void add_chunk() {
    const std::size_t size = std::clamp(total_, kFirst, kMost);
    spare_.reserve(total_ + size);  // so that give_back cannot throw
    chunks_.push_back(std::make_unique<T[]>(size));
    for (std::size_t i = size; i > 0; --i) spare_.push_back(&chunks_.back()[i - 1]);
    total_ += size;
  }

  std::vector<std::unique_ptr<T[]>> chunks_;
  std::vector<T*> spare_;
  std::size_t total_ = 0;
};

}  // namespace understudy
